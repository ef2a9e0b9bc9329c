"""Writes the CRD of EnginePool, generated from the operator's models, into the package and the chart."""

from pathlib import Path

from pagestream_operator.crd import definition_text

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    ROOT / "operator" / "src" / "pagestream_operator" / "crd" / "enginepools.yaml",
    ROOT / "helm" / "pagestream" / "crds" / "enginepools.yaml",
)


def generate() -> None:
    """Write all copies."""
    text = definition_text()
    for target in TARGETS:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    generate()
