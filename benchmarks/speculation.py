"""Speed-ups of speculation, measured in turns with decoding without it.

    python -m benchmarks.speculation replay    # shapes: recorded acceptance, every pass runs
    python -m benchmarks.speculation adaptive  # embedded pair: against off, and fixed lengths
    python -m benchmarks.speculation pair      # any pair of models, real acceptance
    python -m benchmarks.speculation exits     # each exit of the embedded model, against off
    python -m benchmarks.speculation heads     # any drafter of the embedded model, against off
    python -m benchmarks.speculation record    # writes src/ridgeline/bench/ladder/texts.jsonl

Ratios come with the 95 % interval of their mean over rounds, in each of which every contender runs
once, in random order. ``replay`` prints its predictions before it measures. Where outputs must be
equal they are compared.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ridgeline import LLM, SamplingParams
from ridgeline.bench.conditions import Watch
from ridgeline.bench.ladder.measuring import open_executor
from ridgeline.bench.ladder.rungs import LENGTHS, Rung, forecast, priced_models
from ridgeline.bench.ladder.runs import Drafting, TextDecoder, longest
from ridgeline.bench.ladder.subjects import REPLAYED
from ridgeline.bench.ladder.texts import (
    WORKLOADS,
    RecordedText,
    heldout_code,
    read_texts,
    record,
    with_agreement,
    write_texts,
)
from ridgeline.cli.hardware import calibration_of
from ridgeline.core.host import usable_cores
from ridgeline.core.request import RequestOutput
from ridgeline.core.settings.speculation import NAMED_SPECULATION, drafter_names
from ridgeline.evaluation import heldout_texts

DRAFTERS = drafter_names()
ONE_BY_ONE = {"max_model_len": 512, "enable_prefix_caching": False, "max_num_seqs": 1}
_T95 = {
    5: 2.57,
    6: 2.45,
    8: 2.31,
    10: 2.23,
    15: 2.13,
    20: 2.09,
    40: 2.02,
}  # Student's t, by freedom


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    if len(values) < 2:
        return values[0], float("nan")
    freedom = max((known for known in _T95 if known <= len(values) - 1), default=0)
    factor = _T95.get(freedom, 4.3)
    return statistics.mean(values), factor * statistics.stdev(values) / len(values) ** 0.5


def say(**figures: object) -> None:
    """One JSON line; floats to four digits."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(rounded), flush=True)


def replay(options: argparse.Namespace) -> None:
    """Off and the drafter of a shape, at batch 1; at the 1B shape prompt lookup, too.

    ``agreement``: places where the drafter is right are drawn at random, as many as a published
    acceptance asks for, in place of those where the embedded draft model is.
    """
    subject, tokens = REPLAYED[options.subject], options.tokens
    rung = Rung(
        name="replay",
        executor="cpu",
        dtype="bfloat16",
        quantization=options.quantization,
        draft_quantization=options.draft_quantization,
        speculates=True,
    )
    texts = {
        workload: read_texts(workload, options.draft_quantization)[: options.texts]
        for workload in WORKLOADS
    }
    drafters = {"continue": subject.speculation}
    if subject.speculation == "draft":
        drafters["edit"] = "ngram"
    if options.agreement is not None:
        texts = {
            workload: with_agreement(each, options.agreement) for workload, each in texts.items()
        }
    for workload in drafters:
        shares = [text.agreement for text in texts[workload]]
        say(workload=workload, texts=len(shares), draft_agrees=statistics.mean(shares))
    contenders = _predicted(rung, texts, drafters, options)
    everything = [text for each in texts.values() for text in each]
    watch = Watch()
    executor = open_executor(subject, rung, everything)
    decoder = TextDecoder(executor, max_model_len=longest(everything, tokens), has_draft=True)
    for workload, draftings in contenders.items():
        _race(decoder, workload, texts[workload], draftings, options)
    executor.close()
    say(**watch.conditions(threads=usable_cores()))


def _predicted(
    rung: Rung,
    texts: Mapping[str, Sequence[RecordedText]],
    drafters: Mapping[str, str],
    options: argparse.Namespace,
) -> dict[str, dict[Drafting, float]]:
    """Predicted tokens per second of off and the best lengths, by workload."""
    calibration = calibration_of("cpu", anew=options.calibrate)
    models = priced_models(REPLAYED[options.subject], rung)
    lengths = list(map(int, options.drafts.split(",")))
    found = {}
    for workload, drafter in drafters.items():
        draftings = [Drafting(), *(Drafting(speculation=drafter, length=n) for n in lengths)]
        rates = {
            each: forecast(models, calibration, texts[workload], options.tokens, each).tokens_per_s
            for each in draftings
        }
        for each, rate in rates.items():
            speed_up = rate / rates[Drafting()]
            say(workload=workload, drafting=str(each), predicted_tok_s=rate, predicted=speed_up)
        best = sorted(draftings[1:], key=lambda each: -rates[each])[: options.lengths]
        found[workload] = {each: rates[each] for each in (Drafting(), *best)}
    return found


def _race(
    decoder: TextDecoder,
    workload: str,
    texts: Sequence[RecordedText],
    draftings: Mapping[Drafting, float],
    options: argparse.Namespace,
) -> None:
    """Rounds of all contenders in random order."""
    order, rng = list(draftings), random.Random(0)
    decoder.run(texts[:1], order[-1], 8)
    rates: dict[Drafting, list[float]] = {each: [] for each in order}
    per_step = {}
    for _ in range(options.rounds):
        for each in rng.sample(order, len(order)):
            run = decoder.run(texts, each, options.tokens)
            rates[each].append(run.tokens_per_s)
            per_step[each] = run.tokens_per_step
    off = Drafting()
    for each in order:
        ratios = [a / b for a, b in zip(rates[each], rates[off], strict=True)]
        speed_up, interval = mean_interval(ratios)
        predicted = draftings[each] / draftings[off]
        say(
            workload=workload,
            drafting=str(each),
            tok_s=statistics.median(rates[each]),
            predicted_tok_s=draftings[each],
            tokens_per_step=per_step[each],
            speed_up=speed_up,
            interval=interval,
            predicted=predicted,
            error=abs(predicted / speed_up - 1),
        )


def prompts(workload: str, count: int) -> list[str]:
    """Starts of held-out texts; for ``edit``, with the text before them."""
    texts = heldout_code(count)
    texts = [text[200 * lap :] for lap in range(count // len(texts) + 1) for text in texts][:count]
    if workload == "continue":
        return [text[:300] for text in texts]
    return [f"{text[:360]}\n# The same again:\n{text[:40]}" for text in texts]


def run(
    llm: LLM, texts: Sequence[object], params: SamplingParams | list[SamplingParams], salt: str
) -> tuple[float, list[RequestOutput]]:
    """Seconds and outputs of one batch. Outputs of another ``salt`` are not remembered.

    What other engines left for Python's collector is collected before it starts.
    """
    gc.collect()
    started = time.perf_counter()
    outputs = llm.generate(texts, params, cache_salt=salt)  # type: ignore[arg-type]
    return time.perf_counter() - started, outputs


def acceptance(outputs: Sequence[RequestOutput]) -> list[float]:
    """Accepted share of the drafted tokens, by position."""
    samples = [output.outputs[0] for output in outputs]
    width = max((len(sample.num_drafted) for sample in samples), default=0)
    rates = []
    for position in range(width):
        counts = [
            (sample.num_accepted[position], sample.num_drafted[position])
            for sample in samples
            if position < len(sample.num_drafted)
        ]
        rates.append(round(sum(a for a, _ in counts) / max(1, sum(d for _, d in counts)), 3))
    return rates


def pair(options: argparse.Namespace) -> None:
    """Each drafter against none."""
    settings = {"max_model_len": 512, "enable_prefix_caching": False}
    greedy = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    with LLM(options.model, **settings) as off:
        for drafter in options.drafters.split(","):
            speculation = {
                "speculation": drafter,
                "num_speculative_tokens": options.length,
                "draft_shape": options.shape,
                "draft_model": (options.draft_model if drafter in NAMED_SPECULATION else None),
            }
            with LLM(options.model, **settings, **speculation) as on:
                for workload in WORKLOADS:
                    for batch in map(int, options.batches.split(",")):
                        times = _rounds(
                            {"off": off, "on": on}, prompts(workload, batch), greedy, options.rounds
                        )
                        ratios = [a / b for a, b in zip(times["off"], times["on"], strict=True)]
                        speed_up, interval = mean_interval(ratios)
                        case = {"drafter": drafter, "workload": workload, "batch": batch}
                        case["shape"] = options.shape
                        say(**case, speed_up=speed_up, interval=interval)


def exits(options: argparse.Namespace) -> None:
    """Drafts of the first layers of a model, one text at a time, against none."""
    with LLM(options.model, **ONE_BY_ONE) as off:
        texts = {"continue": prompts("continue", options.texts)}
        for layers in map(int, options.layers.split(",")):
            exit_ = {
                "speculation": "exit",
                "draft_layers": layers,
                "num_speculative_tokens": options.length,
                "draft_shape": options.shape,
            }
            with LLM(options.model, **ONE_BY_ONE, **exit_) as on:
                _by_temperature(off, on, texts, options, draft_layers=layers)


def heads(options: argparse.Namespace) -> None:
    """A drafter of hidden states, one text at a time, against none, on texts of four kinds."""
    with LLM(options.model, **ONE_BY_ONE) as off:
        texts = {
            workload: of_kind(off, workload, options.texts)
            for workload in options.workloads.split(",")
        }
        for shape in options.shapes.split(","):
            head = {
                "speculation": options.speculation,
                "draft_model": options.draft_model,
                "num_speculative_tokens": options.length,
                "draft_shape": shape,
            }
            with LLM(options.model, **ONE_BY_ONE, **head) as on:
                _by_temperature(off, on, texts, options, drafter=options.speculation, shape=shape)


def of_kind(llm: LLM, workload: str, count: int) -> Sequence[object]:
    """Prompts of held-out code, prose, edits of code, or questions about prose."""
    if workload in ("code", "edit"):
        return prompts("edit" if workload == "edit" else "continue", count)
    texts = [text for text in heldout_texts("prose") if len(text) > 600][:count]
    if workload == "prose":
        return [text[:300] for text in texts]
    return [
        llm.encode_chat([{"role": "user", "content": f"What does this say?\n{text[:300]}"}])
        for text in texts
    ]


def _by_temperature(
    off: LLM,
    on: LLM,
    texts: Mapping[str, Sequence[object]],
    options: argparse.Namespace,
    **case: object,
) -> None:
    """What is accepted of drafts, and the speed in turns with none."""
    for workload, each in texts.items():
        for temperature in (1.0, 0.7, 0.0):
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=seed,
                    max_tokens=options.tokens,
                    ignore_eos=True,
                )
                for seed in range(len(each))
            ]
            kind = f"{workload} at {temperature}"  # of which no output is remembered for another
            times = _rounds({"off": off, "on": on}, each, params, options.rounds, kind)
            ratios = [a / b for a, b in zip(times["off"], times["on"], strict=True)]
            speed_up, interval = mean_interval(ratios)
            _, outputs = run(on, each, params, kind)
            say(
                **case,
                workload=workload,
                temperature=temperature,
                tokens_per_verification=_tokens_per_verification(outputs),
                accepted=acceptance(outputs),
                speed_up=speed_up,
                interval=interval,
            )


def _tokens_per_verification(outputs: Sequence[RequestOutput]) -> float:
    """Each verification of drafts yields what it accepts, and one token more."""
    samples = [output.outputs[0] for output in outputs]
    verified = sum(sample.num_drafted[0] for sample in samples)
    return 1 + sum(sum(sample.num_accepted) for sample in samples) / verified


def adaptive(options: argparse.Namespace) -> None:
    """What adaptive speculation costs where nothing pays, and what it misses of the best length.

    ``random``: prompts of random tokens, gone on with at a high temperature, where no drafter is
    right often. Engines are opened anew for each of several sets of rounds, since two of the same
    settings differ by some percent for as long as they live; one of these is measured, too.
    """
    settings = {"max_model_len": 512, "enable_prefix_caching": False}
    contenders: dict[str, dict[str, object]] = {
        "off": {},
        "adaptive": {"speculation": "adaptive", "num_speculative_tokens": 6},
    }
    for length in map(int, filter(None, options.fixed.split(","))):
        for drafter in ("draft", "suffix"):
            fixed = {"speculation": drafter, "num_speculative_tokens": length}
            contenders[f"{drafter} {length}"] = fixed
    contenders["off again"] = {}
    cases = [
        (batch, workload)
        for batch in map(int, options.batches.split(","))
        for workload in options.workloads.split(",")
    ]
    times: dict[tuple[int, str], dict[str, list[float]]] = {
        case: {name: [] for name in contenders} for case in cases
    }
    watch = Watch()
    for _ in range(options.sets):
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(LLM(**settings, **each))
                for name, each in contenders.items()
            }
            gc.freeze()  # the collections before each run look at what runs left alone
            for case in cases:
                found = _rounds(engines, *_adaptive_requests(*case, options.tokens), options.rounds)
                for name, seconds in found.items():
                    times[case][name] += seconds
            figures = engines["adaptive"].speculation()
            say(
                steps_by_length=figures.choices.steps_by_length,
                accepted=f"{figures.num_accepted}/{figures.num_drafted}",
            )
    for (batch, workload), found in times.items():
        _say_adaptive(workload, batch, found)
    say(**watch.conditions(threads=usable_cores()))


def _adaptive_requests(
    batch: int, workload: str, num_tokens: int
) -> tuple[Sequence[object], list[SamplingParams]]:
    if workload == "random":
        rng = random.Random(batch)
        texts: Sequence[object] = [rng.sample(range(300, 4000), 64) for _ in range(batch)]
        return texts, [
            SamplingParams(temperature=1.5, seed=number, max_tokens=num_tokens, ignore_eos=True)
            for number in range(batch)
        ]
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return prompts("continue", batch), [greedy] * batch


def _say_adaptive(workload: str, batch: int, times: Mapping[str, Sequence[float]]) -> None:
    def slower(name: str, than: str) -> tuple[float, float]:
        pairs = zip(times[name], times[than], strict=True)
        return mean_interval([a / b - 1 for a, b in pairs])

    fixed = [name for name in times if name not in ("adaptive", "off again")]
    best = min(fixed, key=lambda name: statistics.mean(times[name]))
    slow_down, interval = slower("adaptive", "off")
    median = statistics.median(a / b for a, b in zip(times["adaptive"], times["off"], strict=True))
    same, same_interval = slower("off again", "off")
    behind, behind_interval = slower("adaptive", best)
    say(
        workload=workload,
        batch=batch,
        rounds=len(times["off"]),
        slow_down=slow_down,
        interval=interval,
        median=median - 1,
        off_again=same,
        off_again_interval=same_interval,
        best_fixed=best,
        behind_best=behind,
        behind_interval=behind_interval,
    )


def _rounds(
    engines: Mapping[str, LLM],
    texts: Sequence[object],
    params: SamplingParams | list[SamplingParams],
    rounds: int,
    salt: str = "",
) -> dict[str, list[float]]:
    """Seconds of each engine in each round; the first round warms up, and compares outputs."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        tokens = {}
        for name in rng.sample(list(engines), len(engines)):
            seconds, outputs = run(engines[name], texts, params, f"{salt}{len(texts)}/{turn}")
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
            if turn:
                times[name].append(seconds)
        if len({json.dumps(each) for each in tokens.values()}) > 1:
            sys.exit("Outputs differ between drafters.")
    return times


def main() -> None:
    """Print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(required=True)
    one = modes.add_parser("replay")
    one.add_argument("--subject", choices=tuple(REPLAYED), default="1b")
    one.add_argument("--agreement", type=float, help="share of the output that is guessed")
    one.add_argument("--drafts", default=",".join(map(str, LENGTHS)), help="lengths to choose from")
    one.add_argument("--quantization", choices=("int8", "int4"), help="of the weights")
    one.add_argument("--draft-quantization", choices=("int8", "int4"), help="of the draft model's")
    one.add_argument("--texts", type=int, default=8)
    one.add_argument("--tokens", type=int, default=48)
    one.add_argument("--lengths", type=int, default=1, help="the best predicted ones are measured")
    one.add_argument("--rounds", type=int, default=4)
    one.add_argument("--calibrate", action="store_true")
    one.set_defaults(run=replay)
    one = modes.add_parser("adaptive")
    one.add_argument("--batches", default="1,4,16,64")
    one.add_argument("--workloads", default="continue,random")
    one.add_argument("--fixed", default="1,2,4", help="lengths of the drafts beside; may be empty")
    one.add_argument("--sets", type=int, default=3)
    one.add_argument("--rounds", type=int, default=20, help="of each set")
    one.add_argument("--tokens", type=int, default=64)
    one.set_defaults(run=adaptive)
    one = modes.add_parser("pair")
    one.add_argument("model", nargs="?")
    one.add_argument("--draft-model")
    one.add_argument("--drafters", default=",".join(DRAFTERS))
    one.add_argument("--length", type=int, default=4)
    one.add_argument("--shape", choices=("chain", "tree"), default="chain")
    one.add_argument("--batches", default="1,4,16")
    one.add_argument("--rounds", type=int, default=20)
    one.add_argument("--tokens", type=int, default=96)
    one.set_defaults(run=pair)
    one = modes.add_parser("exits")
    one.add_argument("model", nargs="?")
    one.add_argument("--layers", default="1,2,3,4")
    one.add_argument("--shape", choices=("chain", "tree"), default="chain")
    one.add_argument("--length", type=int, default=4)
    one.add_argument("--texts", type=int, default=8)
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--tokens", type=int, default=96)
    one.set_defaults(run=exits)
    one = modes.add_parser("heads")
    one.add_argument("model", nargs="?")
    one.add_argument("--speculation", choices=DRAFTERS, default="eagle3")
    one.add_argument("--draft-model")
    one.add_argument("--shapes", default="chain,tree")
    one.add_argument("--workloads", default="code,prose,edit,chat")
    one.add_argument("--length", type=int, default=4)
    one.add_argument("--texts", type=int, default=8)
    one.add_argument("--rounds", type=int, default=2)
    one.add_argument("--tokens", type=int, default=96)
    one.set_defaults(run=heads)
    one = modes.add_parser("record")
    one.set_defaults(run=lambda _: write_texts(record()))
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
