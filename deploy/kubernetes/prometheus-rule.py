#!/usr/bin/env python3
"""Print the PrometheusRule that holds the records and alerts of ../prometheus.

    deploy/kubernetes/prometheus-rule.py > deploy/kubernetes/prometheus-rule/prometheus-rule.yaml

The text of the files is indented, not parsed: their comments and their form stay.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "prometheus"
HEAD = """\
# Made by deploy/kubernetes/prometheus-rule.py of ../../prometheus/rules.yml and alerts.yml. Change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: denormd
spec:
  groups:
"""


def groups(name):
    """The lines below `groups:`, two deeper."""
    _, _, below = (FOLDER / name).read_text(encoding="utf-8").partition("\ngroups:\n")
    return "".join(f"  {line}\n" if line else "\n" for line in below.splitlines())


def manifest():
    return HEAD + groups("rules.yml") + groups("alerts.yml")


if __name__ == "__main__":
    sys.stdout.write(manifest())
