#!/usr/bin/env python3
"""Set where `runbook_url` of every alert leads, and write the PrometheusRule of Kubernetes again.

    deploy/prometheus/runbooks.py https://wiki.example/denormd/RUNBOOK.md

The URL is the page that shows deploy/RUNBOOK.md; each alert gets its section (`#denormdbehind`). A hosting service that renders
Markdown (GitHub, GitLab) makes these anchors.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ALERTS = HERE / "alerts.yml"
MANIFEST = HERE.parent / "kubernetes/prometheus-rule"
URL = re.compile(r'(runbook_url: ")[^"#]*(#[a-z]+")')


def main():
    if len(sys.argv) != 2 or not re.fullmatch(r'https?://[^\s"#]+', sys.argv[1]):
        sys.exit(__doc__)
    text, count = URL.subn(lambda found: found[1] + sys.argv[1] + found[2], ALERTS.read_text(encoding="utf-8"))
    ALERTS.write_text(text, encoding="utf-8")
    made = subprocess.run([sys.executable, f"{MANIFEST}.py"], check=True, capture_output=True, text=True).stdout
    (MANIFEST / "prometheus-rule.yaml").write_text(made, encoding="utf-8")
    print(f"{count} alerts lead to {sys.argv[1]}")


if __name__ == "__main__":
    main()
