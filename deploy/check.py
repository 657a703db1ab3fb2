#!/usr/bin/env python3
"""Check the files of this folder, and the workflows, with the tools that will read them, without a cluster.

  Kubernetes   kustomize builds the example (with and without the Prometheus operator's parts), and every object
               passes the schemas of Kubernetes; the operator's two kinds are checked key by key here
  Compose      `docker compose config`, or docker-compose
  systemd      `systemd-analyze verify`
  Prometheus   `promtool check`, and the PrometheusRule fits the rule files
  rules        the example's rules are the shop's
  workflows    GitHub's schema, and bash reads their scripts
  denormd      `config` and `plan --offline` accept each example exactly as it is deployed: its files and its environment

A tool that is not here and cannot be fetched is named as skipped. Exit code 1 when something is wrong.
"""

import base64
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
# Bundles GitHub's schema of workflows. It brings ruamel.yaml.
WORKFLOWS = "check-jsonschema==0.39.0"
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


def python_with(package):
    """A python that has this package: a venv in the cache folder."""
    folder = fetch.cache_folder() / package.replace("==", "-")
    python = folder / "bin" / "python"
    with fetch.locked(folder.parent, package.partition("==")[0]):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            code, _, error = run(sys.executable, "-m", "venv", str(folder))
            if code == 0:
                install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
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
        python = python_with(VALIDATOR)
    except fetch.Unavailable as error:
        return say("skipped", "Kubernetes", f"{VALIDATOR} cannot be installed: {error}")
    with tempfile.TemporaryDirectory(dir=HERE / "kubernetes") as folder:
        overlay = ("kind: Kustomization\napiVersion: kustomize.config.k8s.io/v1beta1\nresources: [../example]\n"
                   "components: [../pod-monitor, ../prometheus-rule]\n")
        Path(folder, "kustomization.yaml").write_text(overlay, encoding="utf-8")
        examples = (("example", HERE / "kubernetes/example"), ("example-sidecar", HERE / "kubernetes/example-sidecar"),
                    ("with the operator's parts", folder))
        for name, path in examples:
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
            wrong = found["wrong"] + operator(found["objects"]) + hardened(found["objects"])
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


def hardened(objects):
    """What the schema does not say: denormd is in it, demands what it should, and its volumes are there."""
    found = [(pod, container) for pod, container in containers(objects)]
    wrong = [] if found else ["no denormd in it"]
    for pod, container in found:
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            wrong.append(f"{container['name']} may write to its image")
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        missing = mounts - {volume["name"] for volume in pod["volumes"]}
        if missing:
            wrong.append(f"{', '.join(missing)} mounted and not there")
    return wrong + as_deployed(objects, found)


def containers(objects):
    """Every container of denormd, with its pod."""
    for one in objects:
        pod = one.get("spec", {}).get("template", {}).get("spec", {}) if one["kind"] in ("Deployment", "Job") else {}
        for container in pod.get("initContainers", []) + pod.get("containers", []):
            if container["image"].split(":")[0] == "denormd":
                yield pod, container


def as_deployed(objects, found):
    """`denormd config` and `plan --offline` with each container's environment, on files as its volumes hold them."""
    binary = program()
    if not binary:
        return []
    wrong = []
    for pod, container in found:
        with tempfile.TemporaryDirectory() as folder:
            for mount in container["volumeMounts"]:
                volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
                kind, name = (("ConfigMap", volume["configMap"]["name"]) if "configMap" in volume
                              else ("Secret", volume["secret"]["secretName"]))
                data = next((one["data"] for one in objects if one["kind"] == kind and one["metadata"]["name"] == name), {})
                place = Path(folder + mount["mountPath"])
                place.mkdir(parents=True)
                for key, text in data.items():
                    place.joinpath(key).write_bytes(base64.b64decode(text) if kind == "Secret" else text.encode())
            given = {one["name"]: one["value"] for one in container.get("env", [])}
            given = {"DENORMD_CONFIG": "/etc/denormd", **given}
            given = {name: folder + value if value.startswith("/") else value for name, value in given.items()}
            wrong += accepts(binary, container["name"], given)
    return wrong


def accepts(binary, what, environment):
    wrong = []
    for command in (["config"], ["plan", "--offline"]):
        code, _, error = run(binary, *command, env=environment)
        if code != 0:
            wrong.append(f"{what}: denormd {' '.join(command)} exits {code}: {error}")
    return wrong


def program():
    """The program: DENORMD, or the newest that is built here."""
    built = [ROOT / "target" / profile / "denormd" for profile in ("debug", "release", "dist")]
    built = sorted((path for path in built if path.exists()), key=lambda path: path.stat().st_mtime)
    return os.environ.get("DENORMD") or (str(built[-1]) if built else None)


def compose_environment():
    """Compose's environment, with a config from the quick start."""
    binary = program()
    if not binary:
        return say("skipped", "examples as deployed", "denormd is not built: cargo build")
    shop = (ROOT / "config/shop.yaml").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shop.yaml").write_text(shop, encoding="utf-8")
        compose = {"DENORMD__MONGODB__URI": "mongodb://mongo-1/?replicaSet=rs0", "DENORMD__HTTP__LISTEN": "0.0.0.0:9464",
                   "DENORMD__HTTP__ALLOWED_HOSTS": "denormd"}
        stack = (HERE / "compose.yaml").read_text(encoding="utf-8")
        wrong = [f"compose.yaml does not set {name}" for name in compose if name not in stack]
        wrong += accepts(binary, "compose.yaml", {"DENORMD_CONFIG": folder, **compose})
    say("FAILED" if wrong else "ok", "Compose as deployed", "; ".join(wrong))


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
        unit = unit.replace("/usr/bin/denormd", shutil.which("true") or "/bin/true")
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


SCRIPTS = """
import json, sys, ruamel.yaml
jobs = [ruamel.yaml.YAML(typ="safe").load(open(name, encoding="utf-8"))["jobs"] for name in sys.argv[1:]]
steps = [step for all in jobs for job in all.values() for step in job["steps"]]
print(json.dumps([step["run"] for step in steps if "run" in step]))
"""


def workflows():
    files = [str(path) for path in sorted((ROOT / ".github/workflows").glob("*.yaml"))]
    try:
        python = python_with(WORKFLOWS)
    except fetch.Unavailable as error:
        return say("skipped", "workflows", f"{WORKFLOWS} cannot be installed: {error}")
    code, out, error = run(python, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    checked("workflows", code, (out + error).strip())
    if code == 0:
        scripts = json.loads(run(python, "-c", SCRIPTS, *files)[1])
        wrong = [error for script in scripts for code, _, error in [run("bash", "-n", "-c", script)] if code != 0]
        checked(f"workflows, {len(scripts)} scripts", bool(wrong), "; ".join(wrong))


def rules():
    shop, example = ROOT / "config/shop.yaml", HERE / "kubernetes/example/shop/shop.yaml"
    # Where its schema is, each file says for itself.
    of = lambda path: [line for line in path.read_text().splitlines() if not line.startswith("# yaml-language-server:")]
    same = of(shop) == of(example)
    checked("rules", not same, f"{example.relative_to(ROOT)} is not {shop.relative_to(ROOT)}: copy it")


def main():
    os.environ.setdefault("LC_ALL", "C")
    for check in (rules, workflows, prometheus, compose, systemd, compose_environment, kubernetes):
        check()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
