"""No part makes code of data that another one sent: what can is named here, with the pipe that it reads."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "services").glob("*/src/**/*.py"),
    *(ROOT / "operator" / "src").rglob("*.py"),
    *(ROOT / "kernels" / "src").rglob("*.py"),
]
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "zmq", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile_command",
    "os.system",
    "os.popen",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.unsafe_load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.recv_object_list",
}
_WORDS = re.compile(
    "|".join(re.escape(each) for each in (*MODULES, *CALLS, "from_pretrained", "trust_remote", "shell="))
)
PIPES = {
    "pagestream_worker/logs/token_logs.py": "from a process to itself, later",
}


def suspicious(path: Path) -> Iterator[str]:
    """Yield what a file imports or calls that can run what it is given."""
    text = path.read_text()
    if not _WORDS.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            remote = [each.value for each in node.keywords if each.arg == "trust_remote_code"]
            is_remote = any(not isinstance(each, ast.Constant) or each.value is not False for each in remote)
            is_asking = name.endswith(".from_pretrained") and not remote
            is_shell = name.startswith("subprocess.") and any(each.arg == "shell" for each in node.keywords)
            if name in CALLS or is_remote or is_asking or is_shell:
                yield name


def test_no_part_reads_pickles() -> None:
    found = {path.as_posix().partition("/src/")[2]: list(suspicious(path)) for path in SOURCES}
    assert len(found) > 500
    assert {path for path, names in found.items() if names} == set(PIPES)
    assert {name for names in found.values() for name in names} == {"marshal"}
