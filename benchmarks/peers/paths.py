"""Where peers and their models are kept: below a folder that git ignores."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = REPOSITORY / "build" / "peers"
RESULTS = REPOSITORY / "benchmarks" / "results"
LLAMA_CPP_TOOLS = PEERS / "llama_cpp" / "build" / "bin"


def peer_python(peer: str) -> Path:
    """The interpreter of a peer's own environment."""
    return PEERS / peer / "env" / "bin" / "python"


def model_folder(shape: str) -> Path:
    """All forms of one shape's random weights."""
    return PEERS / "models" / shape
