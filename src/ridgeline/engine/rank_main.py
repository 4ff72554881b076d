"""A rank's process: ``python -m ridgeline.engine.rank_main SOCKET MEMORY PARENT LEVEL WIRES``.

It logs from the driver's level on. The descriptors of the socket, of the memory and of the wires
(`pipe.Wires`, as JSON) are handed down. What comes over the socket is the driver's
(`ridgeline.executors.distributed`): first which model, and which part of it.
"""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from ridgeline.core.channel import Channel
from ridgeline.core.config import EngineConfig
from ridgeline.core.host import die_with
from ridgeline.core.plan import ModelRole
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft
from ridgeline.executors import create_executor
from ridgeline.executors.distributed.links import exchange_seconds
from ridgeline.executors.distributed.messages import Begin, Command, LinksMeasured
from ridgeline.executors.distributed.pipe import SocketPipe, Wires
from ridgeline.executors.distributed.serving import RankLinks, RankServer, fail, show_life
from ridgeline.executors.distributed.stages import layout_of_draft
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.group import RankGroup
from ridgeline.kernels.cpu.library import load_library
from ridgeline.kernels.cpu.pool import Pool


def main() -> None:
    """Load a part of the model, and serve until the driver is gone."""
    descriptor, memory, parent, level = map(int, sys.argv[1:5])
    wires = msgspec.json.decode(sys.argv[5], type=Wires)
    logging.getLogger("ridgeline").setLevel(level)
    die_with(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the driver says when
        signal.signal(ignored, signal.SIG_IGN)
    channel: Channel[Command] = Channel(socket.socket(fileno=descriptor), Command)
    begin = channel.receive()
    if begin is None:
        return
    assert isinstance(begin, Begin), "a rank begins with what to load"
    try:
        pool = Pool(load_library(), begin.num_threads)
        width = begin.layout.stage_ranks
        group = RankGroup(pool, memory, begin.rank % width, width)
        os.close(memory)
        staged = begin.layout.pipeline > 1
        links = RankLinks(group, SocketPipe(wires, begin.layout) if staged else None)
        show_life(channel, links)
        if begin.config is None:
            channel.send(LinksMeasured(seconds=[exchange_seconds(group, n) for n in begin.sizes]))
            channel.receive()  # until the driver is gone
            return
        with _said_once(begin.rank):
            models = _models(begin, begin.config, links)
            executor = create_executor(models, begin.config)
        gc.collect()
        gc.freeze()  # a full collection would look at the whole model's objects, between two tokens
        RankServer(channel, executor, links).run(list(models))
    except Exception as error:
        fail(channel, error)


def _models(begin: Begin, config: EngineConfig, links: RankLinks) -> dict[ModelRole, ExecutorModel]:
    """This rank's part of each model. Every stage drafts for itself."""
    # The driver has just found the files, and said what there is to say of them.
    config = replace(config, offline=True)
    with _silent():
        target = load_model(config)
        draft = load_draft(config, target)
    layout, group = begin.layout, links.group
    models = {ModelRole.TARGET: target.model.part(layout, begin.rank, group, links.pipe)}
    if draft is not None:
        models[ModelRole.DRAFT] = draft.part(layout_of_draft(layout), group.rank, group)
    return models


@contextmanager
def _silent() -> Iterator[None]:
    """Without warnings, which have been given."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _said_once(rank: int) -> Iterator[None]:
    """Warnings of the first rank alone: the others would say the same."""
    if rank == 0:
        yield
    else:
        with _silent():
            yield


if __name__ == "__main__":
    main()
