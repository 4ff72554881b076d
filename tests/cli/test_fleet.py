"""``ridgeline fleet``: one file for engines, router, plans and checks."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import yaml
from tests.fleet.conftest import KEY
from tests.fleet.test_forwarding import answer, routed
from tests.fleet.test_simulation import MACHINE
from tests.reliability.process import free_port

from ridgeline.cli.fleet_file import read_fleet
from ridgeline.cli.fleet_plan import plan
from ridgeline.cli.main import build_parser, main
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.fleet.app import _told
from ridgeline.fleet.checks import FleetTold, predicted
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.request_log import (
    UNLOGGED,
    LoggedRequest,
    RequestLog,
    read_answer,
    read_log,
)
from ridgeline.fleet.simulation import simulate_fleet
from ridgeline.planning import poisson, read_trace
from ridgeline.server.continuation import ROUTER_KEY, router_token

PLANNED = {
    "model": "qwen2.5-0.5b",
    "slo": {"ttft_s": 0.2, "tpot_s": 0.02},
    "hardware": "l4",
    "load": {"rate_rps": 250, "prompt_tokens": 600, "output_tokens": 100},
}
MODELS = '"data":[{"id":"m"}]'


def file_of(tmp_path, settings):
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def wait_up(url, count, process):
    deadline_s = time.monotonic() + 180
    while True:
        try:
            engines = httpx.get(f"{url}/ready").json()["engines"]
        except httpx.TransportError:
            engines = []
        if sum(each["up"] for each in engines) >= count:
            return
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def wait_for_lines(log, count):
    """A line is written once its answer has gone out."""
    deadline_s = time.monotonic() + 30
    while log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_fleet_starts_and_is_checked_and_drained_by_its_file(tmp_path, capsys):
    port, log = free_port(), tmp_path / "requests.jsonl"
    keys = {"api_key": "secret", "admin_api_key": "admin", "data_dir": str(tmp_path / "data")}
    settings = {
        "budget": {"min_replicas": 2},
        "engine": {"max_num_seqs": 4},
        "router": {"port": port, "request_log": str(log), "request_log_text": True, **keys},
    }
    file = str(file_of(tmp_path, settings))
    command = [sys.executable, "-m", "ridgeline", "fleet", "up", file]
    with open(tmp_path / "log", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_up(url, 2, process)
        assert main(["fleet", "verify", file, "--api-key", "admin"]) == 0
        assert capsys.readouterr().out.count("4 of 4") == 3
        with httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}) as client:
            for stream in (False, True):
                body = {"messages": [{"role": "user", "content": "Sea"}], "stream": stream}
                asked = client.post("/v1/chat/completions", json={**body, "max_tokens": 12})
                assert asked.status_code == 200
        wait_for_lines(log, 2)
        assert log.stat().st_mode & 0o777 == 0o600
        assert "secret" not in log.read_text()
        words = ["fleet", "replay", file, str(log), "--speed", "100", "--api-key", "admin"]
        assert main([*words, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["asked"], report["same"]) == (2, 2)
        assert log.read_bytes().count(b"\n") == 2  # what checks and repeats is not in it
        assert main(["fleet", "drain", file, "1", "--api-key", "secret"]) != 0
        assert main(["fleet", "drain", file, "1", "--api-key", "admin"]) == 0
        assert main(["fleet", "status", file, "--api-key", "secret", "--json"]) == 0
        state = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [each["name"] for each in state["engines"]] == ["0"]
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"modle": "a"}, "there is no setting 'modle'; did you mean 'model'?"),
        ({"budget": {"max_replica": 2}}, "'budget.max_replica'; did you mean 'max_replicas'?"),
        ({"engine": {"max_num_seq": 2}}, "did you mean 'max_num_seqs'"),
        ({"router": {"polcy": "prefix"}}, "did you mean 'policy'"),
        ({"router": {"policy": "none"}}, "policy must be one of least-seconds"),
        ({"router": {"slo": "chat"}}, "router.slo is written slo"),
        ({"slo": {"attainment": 0.9}}, "slo needs a limit"),
        ({"budget": {"min_replicas": 3, "max_replicas": 2}}, "must not exceed"),
        ({"budget": {"min_replicas": 1, "max_replicas": 2}}, "needs slo, the limits"),
        ({"layout": {"tensor": 2}, "engine": {"tensor_parallel_size": 2}}, "are the same"),
        ({"router": {"disaggregate": "auto"}, "budget": {"min_replicas": 2}}, "of engines that"),
        ({"router": {"request_log_text": True}}, "request_log_text has no effect without"),
        ({}, "says nothing: name at least the model"),
        ({"budget": {"max_usd_per_hour": 9}}, "needs the price of a device"),
        (
            {"budget": {"min_replicas": 3, "max_usd_per_hour": 5}, "usd_per_hour": 2},
            "cost $6.00 an hour, more than budget.max_usd_per_hour",
        ),
        (
            {"engines": ["http://a"], "router": {"cascade": ["http://b"], "cascade_threshold": -1}},
            "cascade_threshold",
        ),
    ],
)
def test_what_a_file_cannot_say_is_named(tmp_path, capsys, settings, said):
    assert main(["fleet", "up", str(file_of(tmp_path, settings))]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_file_says_what_the_command_lines_do(tmp_path):
    settings = {
        "model": "a/b",
        "slo": {"ttft_s": 0.5, "attainment": 0.9},
        "budget": {"min_replicas": 2, "max_replicas": 4},
        "layout": {"tensor": 2},
        "tiers": {"ram": "2GiB"},
        "router": {"policy": "prefix", "host": "0.0.0.0", "port": 80, "drain-s": 3},
    }
    file = read_fleet(file_of(tmp_path, settings))
    served = file.served("")
    assert (served.model, served.min_replicas, served.max_replicas) == ("a/b", 2, 4)
    assert (served.tensor_parallel_size, served.kv_ram_tier_bytes) == (2, 2 << 30)
    assert (served.slo, served.port, served.drain_s) == ("ttft=0.5", 80, 3.0)
    assert served.router_settings == {"policy": "prefix", "slo_share": 0.9}
    assert file.url == "http://127.0.0.1:80"
    for host, url in (("::1", "http://[::1]:8000"), ("::", "http://127.0.0.1:8000")):
        assert read_fleet(file_of(tmp_path, {"router": {"host": host}})).url == url
    money = {"usd_per_hour": 0.05, "budget": settings["budget"] | {"max_usd_per_hour": 0.3}}
    assert read_fleet(file_of(tmp_path, settings | money)).served("").max_replicas == 3
    sizes = {"tensor_parallel_size": 1, "pipeline-parallel-size": 3}
    ranks = settings | money | {"layout": "auto", "engine": sizes}
    assert read_fleet(file_of(tmp_path, ranks)).served("").max_replicas == 2
    urls = ["http://a:1", "http://b:1"]
    routed_to = read_fleet(file_of(tmp_path, settings | {"engines": urls})).routed("")
    assert (routed_to.engine, routed_to.max_replicas, routed_to.slo_share) == (urls, 4, 0.9)


def test_an_engine_that_joins_is_of_the_file_and_has_a_key(tmp_path):
    router = {"host": "0.0.0.0", "port": 80, "policy": "prefix", "api_key_file": "keys"}
    router |= {"ssl_certfile": "cert", "ssl_keyfile": "private"}
    settings = {"model": "a/b", "engine": {"max_num_seqs": 4}, "budget": {"min_replicas": 3}}
    with pytest.raises(SettingsError, match="router_key_file"):
        read_fleet(file_of(tmp_path, settings | {"router": router})).joined("", "http://r:80")
    router["router_key_file"] = "key"
    keyless = {name: value for name, value in router.items() if name != "api_key_file"}
    with pytest.raises(SettingsError, match=r"key: name the fleet's in router\.api_key_file"):
        read_fleet(file_of(tmp_path, settings | {"router": keyless})).joined("", "http://r:80")
    found = read_fleet(file_of(tmp_path, settings | {"router": router})).joined("", "http://r:80")
    assert (found.model, found.max_num_seqs, found.replicas) == ("a/b", 4, 1)
    assert (found.host, found.port, found.join) == ("0.0.0.0", 0, ["http://r:80"])
    assert (found.api_key_file, found.router_key_file) == ("keys", "key")
    assert not hasattr(found, "ssl_certfile") and not hasattr(found, "ssl_keyfile")


def test_the_data_folder_of_an_engine_that_joins_ends_with_it(tmp_path, monkeypatch):
    folders = []

    def run(found):
        folders.append(Path(found.data_dir))
        assert folders[-1].is_dir()
        return 0

    monkeypatch.setattr("ridgeline.cli.serve.run", run)
    file = str(file_of(tmp_path, {"router": {"router_key_file": "key", "api_key_file": "keys"}}))
    assert main(["fleet", "join", file, "http://r:80"]) == 0
    assert not folders[0].exists()


def test_a_plan_takes_the_fewest_replicas_that_keep_the_limits_and_the_budget(tmp_path):
    found = plan(read_fleet(file_of(tmp_path, PLANNED)), num_requests=80)
    assert "too short to see a queue that grows" in found["notes"][-1]
    count = found["chosen"]["replicas"]
    assert [each["replicas"] for each in found["points"]] == list(range(1, count + 1))
    assert found["chosen"]["within_limits"] >= 0.95 > found["points"][-2]["within_limits"]
    assert [each["prefill"] for each in found["disaggregated"]] == list(range(1, count))
    usd = found["points"][0]["usd_per_hour"]
    assert found["chosen"]["usd_per_hour"] == pytest.approx(count * usd)
    budget = {"budget": {"max_usd_per_hour": (count - 0.5) * usd}}
    found = plan(read_fleet(file_of(tmp_path, PLANNED | budget)), num_requests=80)
    assert (found["chosen"], len(found["points"])) == (None, count - 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load": None}, "needs load"),
        ({"slo": None}, "needs limits"),
        ({"budget": {"max_usd_per_hour": 0.01}}, "more than budget.max_usd_per_hour"),
    ],
)
def test_a_plan_says_what_it_lacks(tmp_path, change, said):
    with pytest.raises(InvalidRequestError, match=said):
        plan(read_fleet(file_of(tmp_path, PLANNED | change)), num_requests=80)


def test_manifests_start_what_the_file_says(tmp_path, monkeypatch, capsys):
    settings = PLANNED | {
        "budget": {"min_replicas": 2, "max_replicas": 5},
        "engine": {"quantization": "int4", "enable_prefix_caching": False},
        "image": "registry/ridgeline:1",
    }
    file = str(file_of(tmp_path, settings))
    assert main(["fleet", "up", file, "--manifests", str(tmp_path / "out")]) == 0
    parts = list(yaml.safe_load_all((tmp_path / "out" / "fleet.yaml").read_text()))
    by_kind = {part["kind"]: part for part in parts}
    pods = [by_kind[k]["spec"]["template"]["spec"] for k in ("StatefulSet", "Deployment")]
    assert {c["image"] for pod in pods for c in pod["containers"]} == {"registry/ridgeline:1"}
    environment = {each["name"]: each["value"] for each in pods[0]["containers"][0]["env"]}
    assert environment["RIDGELINE_ENABLE_PREFIX_CACHING"] == "false"
    assert environment["RIDGELINE_MODEL"] == "qwen2.5-0.5b"
    found = build_parser().parse_args(pods[1]["containers"][0]["command"][1:])
    assert (len(found.engine), found.max_replicas, found.slo) == (5, 5, "ttft=0.2,tpot=0.02")
    scaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    fixed = {name: value for name, value in settings.items() if name != "slo"}
    fixed["budget"] = {"min_replicas": 3}
    main(["fleet", "up", str(file_of(tmp_path, fixed)), "--manifests", str(tmp_path / "out")])
    parts = list(yaml.safe_load_all((tmp_path / "out" / "fleet.yaml").read_text()))
    assert "HorizontalPodAutoscaler" not in {part["kind"] for part in parts}
    assert [p["spec"]["replicas"] for p in parts if p["kind"] == "StatefulSet"] == [3]


def test_manifests_write_switches_and_lists_as_a_command_line_has_them(tmp_path, capsys):
    router = {"request_log": "log", "request_log_text": True, "cascade_threshold": 1.5}
    urls = ["http://a:1", "http://b:1"]
    file = str(file_of(tmp_path, {"router": router | {"cascade": urls}}))
    assert main(["fleet", "up", file, "--manifests", str(tmp_path)]) == 0
    parts = yaml.safe_load_all((tmp_path / "fleet.yaml").read_text())
    (pod,) = (p["spec"]["template"]["spec"] for p in parts if p["kind"] == "Deployment")
    found = build_parser().parse_args(pod["containers"][0]["command"][1:])
    assert (found.request_log_text, found.cascade) == (True, urls)
    for setting, said in (("api_key_file", "the pod's own"), ("api_key", "write engine.api_key")):
        file = str(file_of(tmp_path, {"router": {setting: "keys"}}))
        assert main(["fleet", "up", file, "--manifests", str(tmp_path)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", ["plan", "status", "verify", "drain", "replay"])
def test_every_command_names_settings_that_there_are_not(tmp_path, capsys, command):
    for change in ({"engine": {"max_num_sqs": 4}}, {"router": {"prot": 1}}):
        file = str(file_of(tmp_path, PLANNED | change))
        log = tmp_path / "log"
        log.write_text("")
        words = {"drain": ["1"], "replay": [str(log)]}.get(command, [])
        assert main(["fleet", command, file, *words]) == 2
        (name,) = next(iter(change.values()))
        assert f"there is no setting '{name}'" in " ".join(capsys.readouterr().err.split())


def test_a_plan_names_what_cannot_be_simulated(tmp_path):
    with pytest.raises(SettingsError, match="must be one of least-seconds"):
        plan(
            read_fleet(file_of(tmp_path, PLANNED | {"router": {"policy": "none"}})), num_requests=80
        )
    with pytest.raises(InvalidRequestError, match="at least 1"):
        plan(read_fleet(file_of(tmp_path, PLANNED)), num_requests=0)


def said_by(text):
    return answer(200, f'{{{MODELS},"choices":[{{"index":0,"text":"{text}"}}]}}'.encode())


def test_verify_names_the_engine_that_gives_other_tokens(tmp_path, capsys):
    file = str(file_of(tmp_path, {}))
    with routed(tmp_path, [said_by("a")], [said_by("b")]) as (client, _):
        state = client.get("/fleet/state").json()
        url = str(client.base_url)
        assert main(["fleet", "verify", file, "--url", url, "--json"]) == 1
    differing = json.loads(capsys.readouterr().out)["differing"]
    first, second = (each["url"] for each in state["engines"])
    assert (differing[first], len(differing[second])) == ([], 4)


def test_verify_says_that_a_key_may_use_no_model(tmp_path, capsys):
    with routed(tmp_path, [answer(200, b'{"data":[]}')]) as (client, _):
        words = ["fleet", "verify", str(file_of(tmp_path, {})), "--url", str(client.base_url)]
        assert main(words) == 1
    assert "lists no model that this key may use" in " ".join(capsys.readouterr().err.split())


def test_what_only_checks_is_not_in_the_log(tmp_path, capsys):
    log = tmp_path / "log"
    with routed(tmp_path, [said_by("a")], request_log=str(log)) as (client, _):
        words = [str(file_of(tmp_path, {})), "--url", str(client.base_url)]
        assert main(["fleet", "verify", *words]) == 0
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        wait_for_lines(log, 1)
        assert main(["fleet", "replay", *words, str(log)]) == 1  # it has no text
    assert len(read_log(log)) == 1


@pytest.mark.parametrize(
    ("shown", "lines"), [({}, 1), ({ROUTER_KEY: b"another"}, 1), ({ROUTER_KEY: None}, 0)]
)
def test_nobody_but_an_admin_keeps_out_of_the_log(tmp_path, shown, lines):
    log, path = tmp_path / "log", "/v1/completions"
    headers = {UNLOGGED: b"1", **{name: key or router_token(KEY) for name, key in shown.items()}}
    asked = [] if not lines else [answer(403)]
    with routed(tmp_path, [*asked, said_by("a")], request_log=str(log)) as (client, _):
        for extra in (headers, {}):
            assert client.post(path, json={"prompt": "x"}, headers=extra).is_success
        wait_for_lines(log, 1 + lines)
    assert len(read_log(log)) == 1 + lines


def test_replay_says_that_an_answer_is_another(tmp_path, capsys):
    file, log = str(file_of(tmp_path, {})), tmp_path / "log"
    with routed(
        tmp_path, [said_by("a"), said_by("a"), said_by("b")],
        request_log=str(log), request_log_text=True,
    ) as (client, _):  # fmt: skip
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        wait_for_lines(log, 1)
        words = ["fleet", "replay", file, str(log), "--url", str(client.base_url), "--json"]
        assert main(words) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["asked"], report["same"], report["other"]) == (1, 0, 1)
    assert report["predicted_seconds"] is None


def test_a_log_without_text_is_a_trace_and_has_no_word_of_anybody(tmp_path, capsys):
    log = tmp_path / "log"
    with routed(
        tmp_path, [said_by("word"), answer(400), said_by("word")], request_log=str(log)
    ) as (client, _):  # fmt: skip
        for _ in range(2):
            client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 3})
        words = ["fleet", "replay", str(file_of(tmp_path, {})), str(log)]
        assert main([*words, "--url", str(client.base_url)]) == 1
    assert "request_log_text: true" in " ".join(capsys.readouterr().out.split())
    (line,) = read_log(log)  # what is refused is none
    assert (line.prompt_tokens, line.body) == (100, None)
    assert "word" not in log.read_text()
    assert not line.is_repeatable
    (arrival,) = read_trace(log)
    assert arrival.prompt_tokens == 100


def test_an_answer_is_the_same_whatever_the_borders_of_its_events():
    def event(text, **more):
        choice = {"index": 0, "delta": {"content": text} | more}
        data = json.dumps({"id": text, "choices": [choice]})
        return f"data: {data}\n\n".encode()

    calls = [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in "xy"]
    both = {"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "xy"}}]}
    cut = event("a", role="assistant") + event("b", **calls[0]) + event("", **calls[1])
    whole = read_answer(event("ab", role="assistant", **both))
    assert read_answer(cut).digest == whole.digest
    assert read_answer(event("ac", role="assistant", **both)).digest != whole.digest
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    answers = [
        json.dumps({"choices": [{"index": 0, "message": message}]}).replace('"c"', each).encode()
        for each in ('"c"', '"d"')
    ]
    assert len({read_answer(each).digest for each in answers}) == 1  # ids are of chance
    assert read_answer(answers[0].replace(b'"f"', b'"g"')).digest != read_answer(answers[0]).digest
    assert read_answer(b"data: {broken\n\n") is None
    assert read_answer(b"[]") is None


@pytest.mark.parametrize("none", [{}, {"seed": None}, {"seed": -1}])
def test_a_request_that_leaves_the_seed_to_chance_is_asked_again_with_the_routers(none):
    logged = LoggedRequest(
        at_s=0, path="", engine="0", prompt_tokens=1, output_tokens=1, seconds=1,
        digest="d", seed=5, body={"prompt": "x"} | none,
    )  # fmt: skip
    assert logged.is_repeatable and logged.again["seed"] == 5
    unknown = msgspec.structs.replace(logged, seed=None)
    assert not unknown.is_repeatable and unknown.again == unknown.body
    own = msgspec.structs.replace(logged, body={"prompt": "x", "seed": 0})
    assert own.again["seed"] == 0


def test_a_log_that_was_there_is_its_owners_alone_from_now_on(tmp_path):
    path = tmp_path / "log"
    path.touch(mode=0o644)
    RequestLog(str(path), with_text=True).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_seconds_of_a_log_are_predicted_by_the_engines_own_price():
    arrivals = poisson(rate_rps=20, num_requests=60, prompt_tokens=900, output_tokens=60)
    requests = [
        LoggedRequest(
            at_s=1e9 + each.arrival_s, path="", engine="0", seconds=1.0,
            prompt_tokens=each.prompt_tokens, output_tokens=each.output_tokens,
        )
        for each in arrivals
    ]  # fmt: skip
    engine = RoutedEngine("0", SimpleNamespace(url=""), None)
    engine.is_up = True
    engine.state = msgspec.structs.replace(
        engine.state,
        max_seqs=MACHINE.settings.max_num_seqs,
        curve=MACHINE.curve,
        pass_s=MACHINE.linear.pass_s,
        token_s=MACHINE.linear.token_s,
        pair_s=MACHINE.linear.pair_s,
    )
    state = msgspec.json.encode({"engines": [_told(engine, 0.0)] * 2})
    fleet = msgspec.json.decode(state, type=FleetTold)  # as the command reads it
    told = fleet.engines[0]
    found = predicted(fleet, requests)
    expected = simulate_fleet(MACHINE, arrivals, POLICIES["least-seconds"](), count=2).traffic
    assert found.mean_end_to_end_s == pytest.approx(expected.mean_end_to_end_s, rel=0.05)
    without = msgspec.structs.replace(told, curve=None)
    assert predicted(FleetTold(engines=(without,)), requests) is None


def test_a_log_that_cannot_be_read_or_written_is_named(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"at_s": 1}\n')
    with pytest.raises(InvalidRequestError, match="line 1"):
        read_log(path)
    with pytest.raises(SettingsError, match="cannot be written"):
        RequestLog(str(tmp_path), with_text=True)
