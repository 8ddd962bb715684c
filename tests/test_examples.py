"""Every example runs as its page says, and its ranks agree."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(name: str, *args: int) -> dict[int, list[float]]:
    import sys

    module = load(name)
    sys.modules[module.__name__] = module  # where the ranks' functions are pickled from
    return module.main(*args)


def test_exactness():
    runs("exactness", 3)


def test_fsdp2_and_ddp_train_alike_on_any_mesh():
    results = [runs("own_model_fsdp2", 2), runs("own_model_ddp", 2)]
    losses = [result[rank] for result in results for rank in (0, 1)]
    assert all(loss == pytest.approx(losses[0], rel=1e-5) for loss in losses)
    assert losses[0][4] < losses[0][2] < losses[0][0]


def test_trainer_logs_the_losses_of_one_process():
    pytest.importorskip("transformers")
    alone, both = runs("transformers_trainer", 1)[0], runs("transformers_trainer", 2)[0]
    assert both == pytest.approx(alone, rel=1e-4) and alone[-1] < alone[0]


def test_the_migration_page_runs():
    pytest.importorskip("transformers")
    page = (EXAMPLES.parent / "docs" / "migration.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), "docs/migration.md", "exec"), {})
