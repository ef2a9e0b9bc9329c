"""No kernel has an assignment that Triton's compiler loses in a loop, and what is told apart is what it loses."""

from __future__ import annotations

from pathlib import Path

import pagestream_kernels
import pytest
import torch
from kernels.lost_carries import LostCarry, in_package, lost_carries
from pagestream_kernels.runtime import jit, tl
from support.kernels.emulator.gpu import emulated, gpu_of
from support.kernels.emulator.memory import GlobalMemory
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds


def test_no_kernel_loses_a_carry() -> None:
    assert in_package(Path(pagestream_kernels.__file__).parent) == {}


def function(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"def kernel(pointer, count, FLAG):\n{lines}\n"


LOSSES = {
    "an alias before the loop": """
now = load(pointer)
before = now
for i in range(count):
    total = now / before
    before = now
    now = load(pointer + i)
""",
    "in a while loop, by a tuple": """
now = load(pointer)
state = (now, count)
before, left = state
while left > 0:
    before, left = now, left - 1
    now = load(pointer + left)
""",
    "a conversion to the type that it has": """
now = load(pointer)
before = now.to(float32)
for i in range(count):
    before = now
    now = load(pointer + i)
""",
    "under conditions of the build": """
now = load(pointer)
before = 1.0
if FLAG:
    before = now
for i in range(count):
    if FLAG:
        before = now
    now = load(pointer + i)
""",
    "by way of another name": """
now = load(pointer)
before = now
for i in range(count):
    held = now
    now = load(pointer + i)
    before = held
""",
    "in the trial of an inner loop": """
now = load(pointer)
before = now
for i in range(count):
    for j in range(count):
        before = now
        now = load(pointer + j)
""",
}
SOUND = {
    "a value of its own": """
now = load(pointer)
before = now + 0.0
for i in range(count):
    before = now
    now = load(pointer + i)
""",
    "equal numbers": """
now = 1.0
before = 1.0
for i in range(count):
    before = now
    now = load(pointer + i)
""",
    "a name that stays as it is": """
first = load(pointer)
before = first
for i in range(count):
    before = first
""",
    "the new value": """
now = load(pointer)
before = now
for i in range(count):
    now = load(pointer + i)
    before = now
""",
}


@pytest.mark.parametrize("body", LOSSES.values(), ids=LOSSES)
def test_a_carry_that_may_be_lost_is_found(body: str) -> None:
    found = lost_carries(function(body))
    assert {(each.function, each.name, each.source) for each in found} == {("kernel", "before", "now")}
    assert all(isinstance(each, LostCarry) and each.line > 1 for each in found)


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND)
def test_a_carry_that_is_kept_is_not_found(body: str) -> None:
    assert lost_carries(function(body)) == []


# -- what Triton does -----------------------------------------------------------------------------------------------


@jit
def sum_of_ratios(
    out_ptr: tl.tensor,
    in_ptr: tl.tensor,
    count: tl.tensor,
    KEEPS: tl.constexpr,  # noqa: N803 - as all of the kernels'
) -> None:
    """Each element by the one before it, added up."""
    now = tl.load(in_ptr)
    before = now
    if KEEPS:
        before = now + 0.0
    total = 0.0
    for i in range(1, count):
        before = now
        now = tl.load(in_ptr + i)
        total += now / before
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, before)


def compiled_sums() -> list[list[float]]:
    """The sum of ratios of 1, 2, 8 and the last element but one, by code that loses `before` and by code that keeps
    it."""
    values = torch.tensor([1.0, 2.0, 8.0])
    results = []
    for keeps in (False, True):
        out = torch.zeros(2)
        with emulated(gpu_of("sm_80")) as gpu:
            gpu.memory = GlobalMemory([out, values])
            sum_of_ratios[(1,)](out, values, len(values), KEEPS=keeps)
        results.append(out.tolist())
    return results


def test_triton_loses_a_carry_of_two_names_for_one_value(compiler: KernelWorker) -> None:
    """Where this fails, Triton has been mended: this file and its rule can go."""
    lost, kept = compiler.run(compiled_sums)
    assert kept == [6.0, 2.0]
    assert lost[1] == 1.0
