#!/usr/bin/env python3
"""Check the files of this folder with the tools that will read them, without a cluster.

  Kubernetes   kustomize builds the example (with and without the Prometheus operator's parts), and every object
               passes the schemas of Kubernetes; the operator's two kinds are checked key by key here
  Compose      `docker compose config`, or docker-compose
  systemd      `systemd-analyze verify`
  Prometheus   `promtool check`, and the PrometheusRule fits the rule files
  rules        the example's rules are the shop's

A tool that is not here and cannot be fetched is named as skipped. Exit code 1 when something is wrong.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests"))
import fetch  # noqa: E402

# Bundles the JSON schemas of every version of Kubernetes. It brings PyYAML.
VALIDATOR = "kubernetes-validate==1.37.0"
# The oldest with native sidecars on by default, and a new one.
VERSIONS = ("1.29", "1.34")
# Of the Prometheus operator: what may stand where.
OPERATOR = {
    "PodMonitor": ({"selector", "podMetricsEndpoints", "namespaceSelector", "jobLabel"}, "podMetricsEndpoints",
                   {"port", "path", "interval", "scheme", "honorLabels"}),
    "PrometheusRule": ({"groups"}, "groups", {"name", "rules", "interval"}),
}

failures = []


def say(state, what, why=""):
    print(f"{state:8} {what}{': ' + why if why else ''}", flush=True)
    if state == "FAILED":
        failures.append(what)


def run(*command, **options):
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
        **options,
    )
    return done.returncode, done.stdout, done.stderr.strip()


def checked(what, code, message):
    say("ok" if code == 0 else "FAILED", what, "" if code == 0 else message)


def validator():
    """A python that has kubernetes-validate: a venv in the cache folder."""
    folder = fetch.cache_folder() / VALIDATOR.replace("==", "-")
    python = folder / "bin" / "python"
    with fetch.locked(folder.parent, "kubernetes-validate"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            code, _, error = run(sys.executable, "-m", "venv", str(folder))
            if code == 0:
                install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", VALIDATOR)
                code, _, error = run(str(python), *install)
            if code != 0:
                raise fetch.Unavailable(error.splitlines()[-1] if error else "no venv")
            (folder / "done").touch()
    return str(python)


VALIDATE = """
import json, sys, yaml, kubernetes_validate
wrong = []
objects = [one for one in yaml.safe_load_all(sys.stdin) if one]
for one in objects:
    if "coreos.com" in one["apiVersion"]:
        continue
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except Exception as error:
            wrong.append(f"{one['kind']} {one['metadata']['name']} ({version}): {getattr(error, 'message', error)}")
print(json.dumps({"wrong": wrong, "objects": objects}))
"""


def kubernetes():
    kustomize = [["kubectl", "kustomize"]] if shutil.which("kubectl") else []
    kustomize += [["kustomize", "build"]] if shutil.which("kustomize") else []
    if not kustomize:
        return say("skipped", "Kubernetes", "neither kubectl nor kustomize is here")
    try:
        python = validator()
    except fetch.Unavailable as error:
        return say("skipped", "Kubernetes", f"{VALIDATOR} cannot be installed: {error}")
    with tempfile.TemporaryDirectory(dir=HERE / "kubernetes") as folder:
        overlay = ("kind: Kustomization\napiVersion: kustomize.config.k8s.io/v1beta1\nresources: [../example]\n"
                   "components: [../pod-monitor, ../prometheus-rule]\n")
        Path(folder, "kustomization.yaml").write_text(overlay, encoding="utf-8")
        for name, path in (("example", HERE / "kubernetes/example"), ("with the operator's parts", folder)):
            what = f"Kubernetes, {name}"
            code, objects, error = run(*kustomize[0], str(path))
            if code != 0:
                say("FAILED", what, error)
                continue
            done = subprocess.run([python, "-c", VALIDATE, *VERSIONS], input=objects, capture_output=True, text=True,
                                  check=False)
            if done.returncode != 0:
                say("FAILED", what, done.stderr.strip())
                continue
            found = json.loads(done.stdout)
            wrong = found["wrong"] + operator(found["objects"]) + sidecar(found["objects"])
            kinds = ", ".join(sorted(one["kind"] for one in found["objects"]))
            say("FAILED" if wrong else "ok", what, "; ".join(wrong) or kinds)


def operator(objects):
    wrong = []
    for one in objects:
        if one["kind"] not in OPERATOR:
            continue
        spec, items, keys = OPERATOR[one["kind"]]
        unknown = set(one["spec"]) - spec | {key for item in one["spec"].get(items) or [] for key in item if key not in keys}
        if unknown or not one["spec"].get(items):
            wrong.append(f"{one['kind']}: {', '.join(sorted(unknown)) or items + ' is empty'}")
    return wrong


def sidecar(objects):
    """What the schema does not say: the patch has arrived, and demands what it should."""
    for one in (one for one in objects if one["kind"] == "Deployment"):
        pod = one["spec"]["template"]["spec"]
        for container in pod.get("initContainers", []):
            security = container.get("securityContext", {})
            if container.get("restartPolicy") == "Always" and security.get("readOnlyRootFilesystem"):
                volumes = {volume["name"] for volume in pod["volumes"]}
                mounts = {mount["name"] for mount in container["volumeMounts"]}
                return [] if mounts <= volumes else [f"{mounts - volumes} are mounted and not there"]
    return ["no Deployment has the sidecar"]


def compose():
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and run(*command, "version")[0] == 0:
            for files in ([], ["compose/stand-in.yaml"]):
                names = [argument for name in ["compose.yaml", *files] for argument in ("-f", str(HERE / name))]
                code, _, error = run(*command, *names, "config", "--quiet")
                checked(f"Compose, {' and '.join(['compose.yaml', *files])} by {' '.join(command)}", code, error)
            return
    say("skipped", "Compose", "neither `docker compose` nor docker-compose is here")


def systemd():
    if not shutil.which("systemd-analyze"):
        return say("skipped", "systemd", "systemd-analyze is not here")
    with tempfile.TemporaryDirectory() as folder:
        # verify looks for the program and the user: stand-ins for what an installation has.
        unit = (HERE / "systemd/denormd.service").read_text(encoding="utf-8")
        unit = unit.replace("/usr/local/bin/denormd", shutil.which("true") or "/bin/true")
        path = Path(folder, "denormd.service")
        path.write_text(unit, encoding="utf-8")
        code, out, error = run("systemd-analyze", "verify", "--man=no", str(path))
        said = [line for line in (out + error).splitlines() if "denormd" in line]
        checked("systemd, denormd.service", code or bool(said), "; ".join(said) or error)
        code, out, error = run("systemd-analyze", "security", "--offline=true", "--no-pager", str(path))
        if code == 0 and out:
            say("ok", "systemd, hardening", out.strip().splitlines()[-1].strip(" →"))


def prometheus():
    spec = importlib.util.spec_from_file_location("prometheus_rule", HERE / "kubernetes/prometheus-rule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = (HERE / "kubernetes/prometheus-rule/prometheus-rule.yaml").read_text(encoding="utf-8")
    same = made == module.manifest()
    checked("PrometheusRule", not same, "not what deploy/kubernetes/prometheus-rule.py prints: run it")
    if not shutil.which("promtool"):
        return say("skipped", "Prometheus", "promtool is not here")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("prometheus/rules.yml", "prometheus/alerts.yml", "compose/prometheus.yml"):
            shutil.copy(HERE / name, folder)
        code, out, error = run("promtool", "check", "config", str(Path(folder, "prometheus.yml")))
        checked("Prometheus, compose/prometheus.yml and the rules", code, (out + error).strip())


def rules():
    shop, example = ROOT / "config/shop.yaml", HERE / "kubernetes/example/shop.yaml"
    # Where its schema is, each file says for itself.
    of = lambda path: [line for line in path.read_text().splitlines() if not line.startswith("# yaml-language-server:")]
    same = of(shop) == of(example)
    checked("rules", not same, f"{example.relative_to(ROOT)} is not {shop.relative_to(ROOT)}: copy it")


def main():
    os.environ.setdefault("LC_ALL", "C")
    for check in (rules, prometheus, compose, systemd, kubernetes):
        check()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
