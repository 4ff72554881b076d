"""``make test-clients``: real clients, unmodified, each in an environment of its own.

Starts ``ridgeline serve`` with the embedded model, makes the environments under ``build/clients``
(or takes those of ``--environments``), runs each client, and prints a table. A client that cannot
be installed is a row that says so.
"""

import argparse
import http.client
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "ollama": "ollama",
    "open-webui": "open-webui torch==2.13.0",  # of those without CUDA
    "lm-eval": "lm-eval[api]",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
}
RECIPES = {  # of examples/: what each needs
    "openai_chat": "openai",
    "anthropic_messages": "anthropic",
    "ollama_chat": "ollama",
    "litellm_chat": "litellm",
    "langchain_chat": "langchain-openai",
    "llama_index_chat": "llama-index-llms-openai-like",
    "instructor_typed": "instructor",
    "pydantic_ai_typed": "pydantic-ai-slim[openai]",
    "agents_sdk_typed": "openai-agents",
    "llm_cli": "llm",
}
PACKAGES |= {name: package for name, package in RECIPES.items() if package not in PACKAGES}
TTFT_SHARE = 0.05
SOCKET_SLACK_S = 0.001  # what our own client, which does nothing else, may see beyond the server's
CLIENT_SLACK_S = 0.010  # the same for clients that do more before, between and after
LOG = Path(tempfile.gettempdir()) / "ridgeline-clients.log"  # of the server


class Environment:
    """A virtual environment with one client in it."""

    def __init__(self, folder, name):
        self.path = folder / f"client-{name}"
        self.problem = None
        if not (self.path / "bin" / "python").exists():
            venv.create(self.path, with_pip=True)
            done = subprocess.run(
                [self.binary("pip"), "install", "--quiet", *PACKAGES[name].split()],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                self.problem = f"not installable: {done.stderr.strip().splitlines()[-1][:200]}"
        self.version = self._version(name)

    def binary(self, name):
        return str(self.path / "bin" / name)

    def _version(self, name):
        package = re.split(r"[\[ ]", PACKAGES[name])[0]
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run(
            [self.binary("python"), "-c", code], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()


def compare_ttft(theirs_s, slack_s=CLIENT_SLACK_S):
    """A client's TTFT of each request beside what the server logged: a quarter must agree.

    What is counted before a request is here, its connection for instance, no server can see; and on
    a busy machine a client that waits for a processor counts that, too. Both only add to some
    requests, while an error of the server's would be in each.
    """
    entries = [json.loads(line) for line in LOG.read_text().splitlines() if line.startswith("{")]
    ours_s = [entry["ttft_s"] for entry in entries if entry.get("ttft_s")][-len(theirs_s) :]
    pairs = list(zip(theirs_s, ours_s, strict=True))
    gaps_s = sorted(theirs - ours for theirs, ours in pairs)
    within = sum(abs(t - o) <= slack_s + TTFT_SHARE * o for t, o in pairs)
    means = [f"{statistics.mean(each) * 1e3:.1f} ms" for each in (theirs_s, ours_s)]
    check = (
        f"TTFT {means[0]}, the server's {means[1]}; within {slack_s * 1e3:g} ms + {TTFT_SHARE:.0%} "
        f"in {within} of {len(pairs)}, median difference {statistics.median(gaps_s) * 1e3:.1f} ms"
    )
    return {"check": check, "problem": None if within * 4 >= len(pairs) else "differ"}


def plain_http(_, url):
    """Our own client, which only waits for the first line of each stream."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    theirs_s = []
    for number in range(30):
        body = {"prompt": f"import os, {number}", "max_tokens": 8, "stream": True}
        start_s = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        response.readline()
        theirs_s.append(time.monotonic() - start_s)
        response.read()
        time.sleep(0.05)  # the server writes its log after the answer
    connection.close()
    return [compare_ttft(theirs_s, SOCKET_SLACK_S)]


def script(name, *arguments):
    """A client script that prints one JSON object per check."""

    def run(environment, url):
        python = environment.binary("python")
        return json_lines([python, str(HERE / f"{name}_client.py"), url, *arguments])

    return run


def json_lines(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not checks:
        checks.append({"check": "run", "problem": (done.stderr or "no output")[-300:]})
    return checks


def lm_eval(environment, url):
    script_path = str(HERE / "lm_eval_client.py")
    return json_lines([sys.executable, script_path, url, environment.binary("lm_eval")])


def open_webui(environment, url):
    script_path = str(HERE / "open_webui_client.py")
    python, binary = environment.binary("python"), environment.binary("open-webui")
    return json_lines([python, script_path, url, binary])


def guidellm(environment, url):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("\n".join(json.dumps({"prompt": f"import os, {i}"}) for i in range(64)))
        command = [
            environment.binary("guidellm"), "run",
            "--backend", f"kind=openai_http,target={url},model=embedded",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10",
            "--data", f"kind=json_file,path={prompts}",
            "--output", f"kind=json,path={report}", "--disable-console",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=folder
        )
        if not report.exists():
            return [{"check": "run", "problem": (done.stderr or done.stdout)[-400:]}]
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    requests = sorted(benchmark["requests"]["successful"], key=lambda r: r["request_start_time"])
    problem = None if made["successful"] == 10 and not made["errored"] else str(made)
    return [
        {"check": f"{made['successful']} requests", "problem": problem},
        compare_ttft([each["time_to_first_token_ms"] / 1e3 for each in requests]),
    ]


def aiperf(environment, url):
    tokenizer = ROOT / "src/ridgeline/assets/target"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            environment.binary("aiperf"), "profile", "--model", "embedded", "--url", url,
            "--endpoint-type", "chat", "--streaming", "--request-count", "10",
            "--concurrency", "1", "--tokenizer", str(tokenizer), "--output-artifact-dir", folder,
            "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--ui", "none",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        reports = list(Path(folder).rglob("profile_export.jsonl"))
        if not reports:
            return [{"check": "run", "problem": (done.stdout + done.stderr)[-400:]}]
        records = [json.loads(line) for line in reports[0].read_text().splitlines()]
    records.sort(key=lambda record: record["metadata"]["request_start_ns"])
    ttfts_ms = [record["metrics"]["time_to_first_token"]["value"] for record in records]
    return [
        {"check": f"{len(records)} requests", "problem": None if len(records) == 10 else "not 10"},
        compare_ttft([ttft_ms / 1e3 for ttft_ms in ttfts_ms]),
    ]


def recipe(name):
    """A script of examples/: it must end well, and say something."""

    def run(environment, url):
        command = [environment.binary("python"), str(ROOT / "examples" / f"{name}.py"), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        failed = done.returncode or not done.stdout.strip()
        problem = (done.stderr[-300:] or "no output") if failed else None
        return [{"check": "recipe", "problem": problem}]

    return run


CLIENTS = {
    "http.client": plain_http,
    "openai": script("openai"),
    "anthropic": script("anthropic"),
    "ollama": script("ollama"),
    "open-webui": open_webui,
    "lm-eval": lm_eval,
    "guidellm": guidellm,
    "aiperf": aiperf,
    **{name: recipe(name) for name in RECIPES},
}


def start_server(folder, port):
    command = [
        sys.executable, "-m", "ridgeline", "serve", "--port", str(port), "--dtype", "float32",
        "--served-model-name", "embedded", "--data-dir", folder,
    ]  # fmt: skip
    with open(LOG, "wb") as log:
        server = subprocess.Popen(command, stderr=log, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        time.sleep(0.1)
        try:
            urllib.request.urlopen(f"{url}/ready")
            return server, url
        except OSError:
            assert server.poll() is None, "the server ended"
    raise RuntimeError("the server is not ready after a minute")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", default=[])
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--port", type=int, default=8377)
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_server(folder, arguments.port)
        try:
            print("| client | version | check | result |\n|---|---|---|---|")
            for name in arguments.clients or CLIENTS:
                package = RECIPES.get(name, name)
                client = package if package in PACKAGES else name
                needs_package = client in PACKAGES
                environment = Environment(arguments.environments, client) if needs_package else None
                version = environment.version if environment else platform.python_version()
                problem = environment.problem if environment else None
                try:
                    checks = (
                        [{"check": "install", "problem": problem}]
                        if problem
                        else CLIENTS[name](environment, url)
                    )
                except subprocess.TimeoutExpired as error:
                    checks = [{"check": "run", "problem": f"no end after {error.timeout:.0f} s"}]
                for check in checks:
                    failed += check["problem"] is not None
                    result = check["problem"] or "ok"
                    shown = " ".join(result.split())
                    print(f"| {name} | {version} | {check['check']} | {shown} |")
                sys.stdout.flush()
        finally:
            server.terminate()
            server.wait(60)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
