"""A rank, joined by torchrun's environment: does jobs, each a run of `distill` or of an adapter.

Argument: a JSON file with a list of jobs. Prints the bytes of rows and state that it holds, by job.
"""

import json
import sys
from pathlib import Path

import torch

from ridgeline.compress.adapters import AdaptedModel
from ridgeline.compress.batches import WindowStream
from ridgeline.compress.block_model import next_token_loss
from ridgeline.compress.calibration import TrainingText, training_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.optimizer import MuonAdam
from ridgeline.compress.ranks import ALONE, TrainingRanks, joined_ranks, own_rows
from ridgeline.compress.training import distill, text_stream
from ridgeline.compress.training_recipe import TrainingRecipe

held_bytes: list[int] = []
_made = MuonAdam.__init__


def _counting(self, model, config):
    _made(self, model, config)
    tensors = [*model.parameters(), *self.state.values()]
    held_bytes.append(sum(own_rows(tensor).nbytes for tensor in tensors))


def stop(step, *_):
    if step == 5:
        raise KeyboardInterrupt


def do(job: dict, ranks: TrainingRanks = ALONE) -> None:
    """One run; with ``stops`` it ends in its fifth step."""
    model = LayeredModel.open(job["student"])
    tokens = training_text("embedded", model.loaded).tokens[:4000]
    text = TrainingText(source="embedded", tokens=tokens)
    recipe, out = TrainingRecipe(**job["recipe"]), Path(job["out"])
    try:
        if job["teacher"] is None:
            adapted = AdaptedModel(model, 4, 0, ranks)
            loss = next_token_loss(adapted.adapted, torch.float32)
            stream: WindowStream = text_stream(text, recipe)
            adapted.train(out, {}, loss, recipe, stream)
        else:
            distill(
                model,
                LayeredModel.open(job["teacher"]),
                out,
                recipe,
                text,
                resume=job.get("resumes", False),
                progress=stop if job.get("stops", False) else None,
                ranks=ranks,
            )
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    MuonAdam.__init__ = _counting
    with joined_ranks(1) as joined:
        for each in json.loads(Path(sys.argv[1]).read_text()):
            do(each, joined)
        print(json.dumps(held_bytes))
