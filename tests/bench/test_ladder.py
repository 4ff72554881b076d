"""The ladder: recorded texts, executors that replay them, predicted steps, the report."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.tiny import CONFIG

from ridgeline import LLM
from ridgeline.bench.conditions import Watch
from ridgeline.bench.ladder.drawing import draw
from ridgeline.bench.ladder.ladder import RungResult, report
from ridgeline.bench.ladder.measuring import Measured
from ridgeline.bench.ladder.replay import ReplayExecutor, ReplaySimulation
from ridgeline.bench.ladder.rungs import RUNGS, Forecast
from ridgeline.bench.ladder.runs import Drafting, TextDecoder, longest
from ridgeline.bench.ladder.subjects import DRAFT_100M, SUBJECTS, Subject
from ridgeline.bench.ladder.texts import WORKLOADS, guesses, read_texts, with_agreement
from ridgeline.cli import main
from ridgeline.cli.display import with_interval
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.plan import ModelRole
from ridgeline.evaluation import Quality
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.executors.simulated import VirtualClock
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.models import describe, lower
from ridgeline.roofline.calibration import typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.weights import dummy_weights, embedded_draft_folder

SHAPE = CONFIG | {"vocab_size": 4096, "max_position_embeddings": 1024, "hidden_size": 64,
                  "intermediate_size": 128, "num_attention_heads": 4}  # fmt: skip
TOKENS = 40
QUALITY = Quality(
    num_tokens=9, perplexity=20.0, reference_perplexity=20.0, kl=0.0, kl_error=0.0, kl_median=0.0,
    kl_tail=0.0, kl_max=0.0, same_top=1.0, rms_dp=0.0,
)  # fmt: skip
DRAFTINGS = [
    Drafting(),
    Drafting(speculation="draft", length=1),
    Drafting(speculation="draft", length=4),
    Drafting(speculation="ngram", length=5),
    Drafting(speculation="combined", length=3),
]


def tiny(seed):
    spec = describe(SHAPE).spec
    ops = lower(spec)
    weights = dummy_weights(ops, dtype="float32", seed=seed)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="float32")


@pytest.fixture(scope="module")
def models():
    return {ModelRole.TARGET: tiny(1), ModelRole.DRAFT: tiny(2)}


def expected_steps(text, length):
    """Steps that drafts of a fixed length by the draft model need, after the prompt's."""
    position, steps = 0, 0
    while position < TOKENS:
        # The last token of an output is never drafted: one always follows.
        room = min(length, TOKENS - position - 1)
        accepted = 0
        while (
            accepted < room and text.draft[position + accepted] == text.output[position + accepted]
        ):
            accepted += 1
        position, steps = position + accepted + 1, steps + 1
    return steps - 1


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
def test_what_was_recorded_is_said_and_simulated(models, workload, drafting):
    """The texts come out token for token, in as many steps as the simulation takes."""
    texts = read_texts(workload)[:2]
    length = longest(texts, TOKENS)
    clock = VirtualClock()
    priced = {role: priced_model(model, "cpu") for role, model in models.items()}
    calibration = typical(load_catalogue(None).device("l4").ceilings())
    simulation = ReplaySimulation(priced, calibration, clock, texts=texts)
    real = ReplayExecutor(models, 16, texts=texts)
    runs = []
    for executor, virtual in ((real, None), (simulation, clock)):
        decoder = TextDecoder(executor, max_model_len=length, has_draft=True, clock=virtual)
        said = {}
        runs.append(decoder.run(texts, drafting, TOKENS, said))
        assert said == {number: text.output[:TOKENS] for number, text in enumerate(texts)}
    executed, predicted = runs
    real.close()
    assert executed.num_tokens == predicted.num_tokens
    assert predicted.seconds > 0
    if drafting.speculation != "off":  # without drafts the real one may repeat steps in one plan
        assert executed.num_steps == predicted.num_steps
    if drafting.speculation == "draft":
        assert executed.num_steps == sum(expected_steps(text, drafting.length) for text in texts)


EAGLE3 = SHAPE | {"num_hidden_layers": 1, "draft_vocab_size": 512,
                  "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # fmt: skip
HEADS = [
    Subject(name="tiny", config=SHAPE, draft=EAGLE3, speculation="eagle3"),
    Subject(name="tiny", config=SHAPE | {"num_nextn_predict_layers": 1}, speculation="mtp"),
]


@pytest.mark.parametrize("subject", HEADS, ids=lambda subject: subject.speculation)
def test_drafters_of_hidden_states_are_replayed_with_a_published_acceptance(subject):
    texts = with_agreement(read_texts("continue")[:2], 0.75)
    assert 0.65 < np.mean([text.agreement for text in texts]) < 0.85
    drafting = Drafting(speculation=subject.speculation, length=3)
    models = subject.models("float32", dict.fromkeys(ModelRole))
    clock, length = VirtualClock(), longest(texts, TOKENS)
    priced = {role: priced_model(model, "cpu") for role, model in models.items()}
    calibration = typical(load_catalogue(None).device("l4").ceilings())
    simulation = ReplaySimulation(priced, calibration, clock, texts=texts)
    real = ReplayExecutor(models, 16, texts=texts)
    for executor, virtual in ((real, None), (simulation, clock)):
        decoder = TextDecoder(executor, max_model_len=length, has_draft=True, clock=virtual)
        said = {}
        run = decoder.run(texts, drafting, TOKENS, said)
        assert said == {number: text.output[:TOKENS] for number, text in enumerate(texts)}
        assert run.num_steps == sum(expected_steps(text, drafting.length) for text in texts)
    real.close()


def test_the_record_is_of_the_embedded_pair():
    """Both models, in another number format, agree where the record says so."""
    exact = {"executor": "reference", "dtype": "float32"}
    formats = {None: exact}
    if native_kernels_run():
        formats |= {form: {"executor": "cpu", "quantization": form} for form in ("int8", "int4")}
    for form, settings in formats.items():
        text = read_texts("continue", form)[0]
        with LLM(**exact) as target, LLM(str(embedded_draft_folder()), **settings) as draft:
            said = guesses(target, text.prompt, text.output)
            guessed = guesses(draft, text.prompt, text.output)
        recorded = np.array(text.draft) == np.array(text.output)
        assert np.mean((guessed == said) == recorded) > 0.97, form


def test_what_was_not_recorded_is_not_read():
    with pytest.raises(ValueError, match="No edit texts are recorded for drafts in int3"):
        read_texts("edit", "int3")
    assert len({text.prompt for each in WORKLOADS for text in read_texts(each)}) == 16


def test_the_draft_shape_has_about_100m_parameters():
    ops = lower(describe(DRAFT_100M).spec)
    weights = dummy_weights(ops, dtype="bfloat16", seed=0)
    assert 80e6 < sum(weight.size for weight in weights.values()) < 120e6
    assert DRAFT_100M["vocab_size"] == SUBJECTS["1b"].config["vocab_size"]


def climbed():
    return [
        RungResult(
            rung=rung,
            drafting=Drafting(speculation="draft", length=2) if rung.speculates else Drafting(),
            format="bfloat16",
            weights_bytes=1e9,
            predicted=Forecast(tokens_per_s=9.0 * number) if number > 1 else None,
            measured=Measured(
                rates=(9.0 * number, 10.0 * number, 90.0), tokens_per_step=1.0, resident_bytes=2
            ),
            quality=QUALITY if number < 3 else None,
        )
        for number, rung in enumerate(RUNGS, start=1)
    ]


def test_the_report_and_the_drawing(tmp_path):
    result = report({"1b": climbed()}, Watch())
    rungs = result["subjects"]["1b"]
    assert [rung["speed_up"] for rung in rungs] == pytest.approx([*range(1, len(RUNGS) + 1)])
    assert rungs[1]["predicted_speed_up"] is None
    assert json.loads(json.dumps(result)) == result
    path = tmp_path / "ladder.svg"
    draw(result["subjects"], path)
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert path.stat().st_size > 1000, text


@pytest.mark.parametrize("words", [["--subjects", "2b"], ["--tokens", "0"], ["--texts", "9"]])
def test_wrong_words_are_refused(words, capsys):
    assert main(["bench", "ladder", *words]) == InvalidRequestError("").exit_code
    assert "error:" in capsys.readouterr().err


def test_what_was_measured_is_printed_even_if_it_cannot_be_drawn(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(
        "ridgeline.bench.ladder.ladder.climb", lambda *_, **__: folder.rmdir() or climbed()
    )
    words = ["--measure-only", "--json", "--svg", str(folder / "a.svg")]
    assert main(["bench", "ladder", *words]) == 1
    captured = capsys.readouterr()
    assert set(json.loads(captured.out)["subjects"]) == {"embedded"}
    assert "cannot be written" in captured.err


def test_rungs_are_printed_as_they_come_and_nothing_else_is_measured(monkeypatch, capsys, tmp_path):
    """A newcomer's ladder does not begin with minutes of calibration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeline.bench.calibration.calibrate_here", lambda *_, **__: 1 / 0)
    printed = []

    def climb(subject, calibrations, *, show, **_):
        assert (subject, calibrations) == ("embedded", {})
        for rung in report({subject: climbed()}, Watch())["subjects"][subject]:
            show(rung)
            printed.append(capsys.readouterr().out.splitlines())
        return climbed()

    monkeypatch.setattr("ridgeline.bench.ladder.ladder.climb", climb)
    assert main(["bench", "ladder"]) == 0
    header, *_ = printed[0]
    rows = [lines[-1] for lines in printed]
    assert header.startswith("embedded") and len(printed[0]) == 2
    assert [len(lines) for lines in printed[1:]] == [1] * (len(RUNGS) - 1)
    for number, (row, rung) in enumerate(zip(rows, RUNGS, strict=True), start=1):
        rates = sorted([9.0 * number, 10.0 * number, 90.0])
        assert row.startswith(rung.name)
        assert len(row) <= len(header) <= 100
        assert with_interval(rates[1], rates[0], rates[2]) in row
    assert "Nothing is predicted for reference and cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_the_embedded_model_climbs(capsys, tmp_path):
    words = ["--subjects", "embedded", "--tokens", "16", "--texts", "1", "--rounds", "1"]
    words += ["--measure-only"]
    assert main(["bench", "ladder", *words, "--json", "--svg", str(tmp_path / "a.svg")]) == 0
    result = json.loads(capsys.readouterr().out)
    rungs = result["subjects"]["embedded"]
    assert [rung["name"] for rung in rungs] == [rung.name for rung in RUNGS]
    assert rungs[3]["speed_up"] > max(2, 2 * rungs[2]["speed_up"])  # own kernels, no KV cache
    assert all(rung["kl"] < 0.05 for rung in rungs)
