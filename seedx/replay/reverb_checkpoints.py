"""Checkpoints that Reverb servers write, and what is known of the items in them."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from seedx.replay.reverb_client import ReverbClient, ReverbLostError
from seedx.replay.reverb_sampler import Samples
from seedx.replay.reverb_writer import Writer

_TRY_S = 5.0


class Checkpoints:
    """Has the servers write checkpoints, and tells writers and samples of those that succeeded.

    Args:
        clients: The servers.
        writers: One for each server.
        samples: Of all servers.

    Attributes:
        failed: Checkpoints that failed, of those that `try_take` was asked for.
    """

    def __init__(self, clients: Sequence[ReverbClient], writers: Sequence[Writer], samples: Samples) -> None:
        self._clients = clients
        self._writers = writers
        self._samples = samples
        self.failed = 0

    def take(self, give_up_s: float | None = None) -> list[str]:
        """Has every server write one, also where another cannot; their directories there.

        Args:
            give_up_s: How long a server that is gone is waited for; None: as long as the client does.

        Raises:
            ReverbLostError: a server has been gone for too long.
            grpc.RpcError: a server could not write it, for example because its disk is full.
        """
        paths, state_ids, failures = [], [], []
        for client, writer in zip(self._clients, self._writers, strict=True):
            progress = writer.progress()
            try:
                client.server_info(give_up_s)  # one that hangs would let us wait for minutes
                path = client.checkpoint(give_up_s)
                # One that died meanwhile, and was started again, has saved what was left of its table.
                state_id = client.server_info().tables_state_id
            except (ReverbLostError, grpc.RpcError) as error:
                failures.append(error)
                continue
            paths.append(path)
            state_ids.append(state_id)
            if state_id == progress.state_id:
                writer.checkpointed(progress)
        if failures:
            raise failures[0]
        self._samples.checkpointed(state_ids)
        return paths

    def try_take(self) -> None:
        """Has them write one; a failure is counted, and said the first time.

        The checkpoint before still counts, so that a server that is gone is waited for for seconds only.
        """
        try:
            self.take(_TRY_S)
        except (ReverbLostError, grpc.RpcError) as error:
            if not self.failed:
                words = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
                print(
                    f"no checkpoint of the Reverb table was written ({words}). A run that goes on tries again; a "
                    "server that is started again loads the one before. Later failures: replay/failed_checkpoints.",
                    flush=True,
                )
            self.failed += 1
