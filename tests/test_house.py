"""How the code is laid out: on a CPU the plain model runs as it reads, and imports have no cycle."""
import ast
import graphlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [*ROOT.glob("*.py"), *ROOT.glob("fast/*.py"), *ROOT.glob("tools/*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

CHECKED_SAMPLE = """
import sys
import model, ops, sample
sample.checkpoint, sample.device, sample.length = "assets/novelist", "cpu", 20
calls, denoise, generate = [], model.Layer.denoise, sample.generate
model.Layer.denoise = lambda layer, *inputs: calls.append(layer) or denoise(layer, *inputs)

def checked(generating, *request, **rest):
    assert ops.FAST == {} and not {"fast", "torch._dynamo"} & {*sys.modules}
    assert type(generating) is model.BlockDiffusionLM
    assert request[2] == sample.Sampler([1337], "strided", 1, mask_id=257) and rest["stop_token"] is None
    return generate(generating, *request, **rest)

sample.generate = checked
for engine in ("auto", "simple"):
    sample.engine = engine
    sample.main()
print(f"{len(calls)} calls of Layer.denoise")
"""


def test_what_runs_on_a_cpu_is_the_plain_model_as_it_reads():
    """A breakpoint in model.Layer.denoise stops under `python sample.py`, which draws as its settings say."""
    done = subprocess.run([sys.executable, "-c", CHECKED_SAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    # 2 engines; 15 steps, as one of 16 tokens is known, then 16; 8 layers
    assert done.stdout.endswith(f"\n{2 * (15 + 16) * 8} calls of Layer.denoise\n")


def imported(path):
    """Yields (module of ours, whether inside a function) for the imports of a file. Its script part is left out."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in ast.dump(node.test))]
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    inside = {inner for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in MODULES:
                yield name, node in inside


def test_imports_run_one_way():
    graph = {name: {target for target, _ in imported(path)} - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()         # raises an error that names a cycle
    scripts = {"train", "sample", "eval", "bench"}
    assert not any(graph[name] & scripts for name in graph if name.startswith("fast"))
    assert not any(graph[name] & (scripts - {"sample"}) for name in scripts)


def test_fast_is_imported_inside_functions_alone_by_two_files():
    users = {(name, inside) for name, path in MODULES.items() for target, inside in imported(path)
             if target.split(".")[0] == "fast" and not name.startswith(("fast", "tools"))}
    assert users <= {("parallel", True), ("sample", True)}
