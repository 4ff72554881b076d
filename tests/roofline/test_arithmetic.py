"""The published worked examples, as doctests; and what they do not show."""

import doctest

import pytest

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import number_format
from ridgeline.roofline import catalogue, metrics, op_cost, pipeline, slo, speculation
from ridgeline.roofline.catalogue import DeviceKind, load_catalogue


def test_worked_examples():
    for module in (metrics, op_cost, pipeline, slo, speculation):
        outcome = doctest.testmod(module)
        assert outcome.attempted > 0, module
        assert outcome.failed == 0, module


def test_every_device_has_a_roof_and_every_source_is_explained():
    loaded = load_catalogue()
    assert {"h100", "h200", "l4", "v100", "a6000", "epyc-9654"} <= set(loaded.devices)
    for device in loaded.devices.values():
        ceilings = device.ceilings()
        assert not ceilings.measured
        assert ceilings.memory.bytes_per_s >= 5e8


@pytest.mark.parametrize(
    ("device", "form", "tflops"),
    [
        ("h100", "float32", 67),
        ("t4", "fp8", 65),  # float16's: 130 are of integers
        ("a100", "fp8", 312),
        ("gaudi3", "int8", 1835),
        ("l4", "bfloat16", 121),
        ("m4-max", "bfloat16", 18),
        ("t4", "bfloat16", 8.1),  # its tensor cores have float16 alone
        ("v100", "bfloat16", 15.7),
        ("v100", "float16", 125),
        ("h100", "float16", 989),
        ("b200", "mxfp4", 9000),
        ("h100", "q6_k", 1979),
        ("h100", "float64", 33.5),
    ],
)
def test_a_format_has_its_own_rate_or_a_wider_ones(device, form, tflops):
    ceilings = load_catalogue().device(device).ceilings()
    assert ceilings.has_rate(number_format(form))
    assert ceilings.peak_flops(number_format(form)) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "form", "own"),
    [
        ("t4", "fp8", False),  # multiplied in the activations' format, whichever they are
        ("v100", "fp8", False),
        ("a100", "fp8", False),
        ("t4", "bfloat16", False),
        ("t4", "int8", True),
        ("l4", "fp8", True),
        ("h100", "fp8", True),
        ("gaudi3", "fp8", True),
        ("a100", "int4-g64", True),
    ],
)
def test_a_format_has_a_rate_of_its_own_where_products_are_in_it(device, form, own):
    ceilings = load_catalogue().device(device).ceilings()
    assert ceilings.has_own_rate(number_format(form)) is own


def test_a_rate_that_nobody_published_is_not_made_up():
    ceilings = load_catalogue().device("tpu-v5e").ceilings()
    assert not ceilings.has_rate(number_format("float32"))
    with pytest.raises(InvalidRequestError, match="v5e has no rate for float32"):
        ceilings.peak_flops(number_format("float32"))


BOX = """
[sources]
mine = "measured"
[devices.box]
name = "Box"
memory_gb = { value = 64, source = "mine", confidence = "high" }
bandwidth_tbps = { value = 0.05, source = "mine", confidence = "high" }
tflops.float32 = { value = 1, source = "mine", confidence = "low" }
"""


def test_users_add_their_own(tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(BOX + 'link_gb_per_s = { value = 9, source = "mine", confidence = "low" }\n')
    loaded = load_catalogue(path)
    box = loaded.device("box")
    assert (box.memory_bytes, box.kind) == (64e9, DeviceKind.GPU)
    assert box.ceilings().link_bytes_per_s == 9e9
    assert loaded.device("H100").name.startswith("NVIDIA")


def test_an_old_name_of_a_figure_is_answered_with_the_new_one(tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(BOX + 'link_gbps = { value = 9, source = "mine", confidence = "low" }\n')
    with pytest.raises(InvalidRequestError, match="box: link_gbps is called link_gb_per_s"):
        load_catalogue(path)


@pytest.mark.parametrize(
    ("device", "mebibytes"), [("h100", 81559), ("h200", 143771), ("l4", 23034), ("t4", 15360)]
)
def test_memory_is_what_drivers_report(device, mebibytes):
    """Not the round number of the name."""
    cell = load_catalogue().device(device).memory_gb
    assert cell.value * 1e9 == pytest.approx(mebibytes * 2**20, abs=1e6)
    assert cell.source == "driver"


def test_devices_that_are_no_gpus_say_so():
    kinds = {key: device.kind.value for key, device in load_catalogue().devices.items()}
    others = {key: kind for key, kind in kinds.items() if kind != "gpu"}
    assert set(others) == {
        "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "gaudi3", "inferentia2", "trainium",
        "trainium2", "wse-3", "groq-lpu", "jetson-agx-orin", "jetson-agx-thor", "edge-tpu",
        "m3-max", "m4-max", "epyc-9654", "xeon-8480",
    }  # fmt: skip
    assert others["xeon-8480"] == "cpu"
    assert others["tpu-v5e"] == "tpu"


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[sources]\n[devices.a]\nname = 'a'\n",
        "[sources]\n[devices.a]\nname='a'\nmemory_gb={value=-1,source='x',confidence='high'}\n"
        "bandwidth_tbps={value=1,source='x',confidence='high'}\ntflops={}\n",
        BOX + 'kind = "abacus"\n',
        "\udcff",
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "hardware.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequestError):
        load_catalogue(path)


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(InvalidRequestError, match="h100"):
        load_catalogue().device("h101")
    assert catalogue.load_catalogue().sources["vendor"]


@pytest.mark.parametrize(
    ("machine", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("AMD EPYC 9654 96-Core Processor", "epyc-9654"),
        ("Intel(R) Xeon(R) Platinum 8480+", "xeon-8480"),
        ("Apple M3 Max", "m3-max"),
        ("AMD EPYC", None),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", None),
        ("NVIDIA H1000", None),
    ],
)
def test_a_machine_is_found_by_the_name_that_it_gives_itself(machine, key):
    catalogue = load_catalogue()
    found = catalogue.known_as(machine)
    assert found is (None if key is None else catalogue.devices[key])
