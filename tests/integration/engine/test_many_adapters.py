"""More adapters than places: they come from their files, leave slots and host memory for others, and come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.adapters import loader
from pagestream_engine.adapters.files import read_adapter
from pagestream_engine.adapters.modules import adaptable_modules
from pagestream_engine.models.select import open_model
from pagestream_engine.request.adapter import Adapter, LoRARequest
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from safetensors.torch import save_file
from support.engines.tiny_models import make_model, random_prompts

NUM_ADAPTERS, AT_ONCE, IN_MEMORY = 300, 32, 40


def write_adapter(model: Path, folder: Path, number: int) -> LoRARequest:
    """Write random matrices of rank 1 to 3 for all modules of a model."""
    weights, rank = open_model(model).weights, 1 + number % 3
    assert weights is not None
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, module in adaptable_modules(weights).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(module.rows, rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4}))
    return LoRARequest(folder.name, number + 1, str(folder))


def test_300_adapters_of_which_32_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", "llama")
    made = [write_adapter(model, tmp_path / f"adapter-{number}", number) for number in range(NUM_ADAPTERS)]
    reads: list[str] = []

    def read(adapter: Adapter, **rest: Any) -> Any:
        reads.append(adapter.name)
        return read_adapter(adapter, **rest)

    monkeypatch.setattr(loader, "read_adapter", read)
    llm = LLM(
        model,
        dtype="float32",
        device="cpu",
        deterministic=True,
        enable_lora=True,
        max_loras=AT_ONCE,
        max_cpu_loras=IN_MEMORY,
        max_num_seqs=2 * AT_ONCE,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
    )
    (prompt,) = random_prompts([6])
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    at_once: list[int] = []

    def note(step: ScheduledStep) -> None:
        at_once.append(len({entry.seq.adapter_revision for entry in (*step.prefills, *step.decodes)} - {None}))

    llm.engine.on_schedule = note
    together = llm.generate([prompt] * NUM_ADAPTERS, params, lora_request=made)
    assert max(at_once) <= AT_ONCE
    assert sorted(reads) == sorted(each.lora_name for each in made)
    at_once.clear()
    again = llm.generate([prompt] * AT_ONCE, params, lora_request=made[-AT_ONCE:])
    assert max(at_once) == AT_ONCE
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in together[-AT_ONCE:]]
    # The last ones are in host memory still; the first ones have to be read again, and take the slots of others.
    for number in (*range(8), *range(NUM_ADAPTERS - 12, NUM_ADAPTERS)):
        (alone,) = llm.generate([prompt], params, lora_request=made[number])
        assert alone.outputs[0].token_ids == together[number].outputs[0].token_ids, number
    assert reads[NUM_ADAPTERS:] == [each.lora_name for each in made[:8]]
    assert len({tuple(each.outputs[0].token_ids) for each in together}) > NUM_ADAPTERS // 2
    llm.engine.check_invariants()
    llm.engine.close()
