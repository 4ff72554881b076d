import functools
import json

import pytest
import torch
from tests.parity.every_case import CASES
from tests.parity.oracle import make_oracle
from tests.tiny import CONFIG
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices on a busy machine: more threads wait for each other, ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def oracle_of(tmp_path_factory):
    """The oracle of a case, made once."""

    @functools.cache
    def make(case_id):
        case = next(case for case in CASES if case.id == case_id)
        return make_oracle(case, tmp_path_factory.mktemp(case.id))

    return make


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """transformers' model, and its folder."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return model, folder
