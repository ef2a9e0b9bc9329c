import pytest
from pagestream_engine.cpu import (
    computes_bfloat16_on_amx,
    instruction_sets,
    processor_identity,
    usable_instruction_sets,
)

SAPPHIRE_RAPIDS = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1
"""
EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9R14
flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_bf16
"""
GRAVITON = """\
processor\t: 0
Features\t: fp asimd bf16 i8mm
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("cpuinfo", "environ", "expected"),
    [
        (SAPPHIRE_RAPIDS, {}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": ""}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "misspelt"}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, False),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "avx2"}, False),
        (SAPPHIRE_RAPIDS, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, False),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
        (EPYC, {}, False),
        (GRAVITON, {}, False),
        ("", {}, False),
    ],
)
def test_whether_bfloat16_runs_on_amx(cpuinfo: str, environ: dict[str, str], expected: bool) -> None:
    assert computes_bfloat16_on_amx(cpuinfo, environ) is expected


@pytest.mark.parametrize(
    ("limit", "ruled_out"),
    [
        ("AVX512_CORE_AMX", ()),
        ("avx512_core_fp16", ("amx",)),
        ("AVX512_CORE_BF16", ("amx",)),
        ("avx512_core_vnni", ("amx", "avx512_bf16")),
        ("AVX2_VNNI", ("amx", "avx512")),
        ("SSE41", ("amx", "avx512", "avx2")),
    ],
)
def test_what_a_limit_rules_out(limit: str, ruled_out: tuple[str, ...]) -> None:
    has = instruction_sets(SAPPHIRE_RAPIDS)
    usable = usable_instruction_sets(SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": limit})
    assert has - usable == {name for name in has if name.startswith(ruled_out)}
    assert usable_instruction_sets(GRAVITON, {"ONEDNN_MAX_CPU_ISA": limit}) == instruction_sets(GRAVITON)


def test_only_what_every_processor_has_counts() -> None:
    assert "amx_bf16" not in instruction_sets(SAPPHIRE_RAPIDS + EPYC)
    assert {"avx512f", "avx512_bf16"} <= instruction_sets(SAPPHIRE_RAPIDS + EPYC)
    assert instruction_sets(GRAVITON) == {"fp", "asimd", "bf16", "i8mm"}
    assert instruction_sets("") == frozenset()


def test_the_identity_is_of_name_and_instructions_alone() -> None:
    second = SAPPHIRE_RAPIDS.replace("processor\t: 0", "processor\t: 1").replace("spectre_v1", "mds")
    assert processor_identity(SAPPHIRE_RAPIDS + second) == processor_identity(SAPPHIRE_RAPIDS)
    assert processor_identity(SAPPHIRE_RAPIDS) != processor_identity(EPYC)
    assert b"0xd40" in processor_identity(GRAVITON)
