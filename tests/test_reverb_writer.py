"""What the writer sends and counts, against a server that keeps Reverb's rules and ends when told to."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from seedx.config import Config
from seedx.replay import reverb_pb2 as pb
from seedx.replay import reverb_writer
from seedx.replay.build import snapshot_of
from seedx.replay.reverb_replay import ReverbReplay
from seedx.types import Unroll

S = 60.0


class Server:
    """Acknowledges inserts; knows the chunks that it was told to keep and no others."""

    def __init__(self):
        self.starts = 0
        self.dies_in_checkpoints = 0
        self.is_full = False
        self.kept = []  # how many chunks were named, for each request
        self.address = ""
        self.start()

    def start(self):
        self.starts += 1
        self._server = grpc.server(ThreadPoolExecutor(8))
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            name: method(getattr(self, name), getattr(pb, f"{name}Request").FromString, to_bytes)
            for method, names in ((unary, ("ServerInfo", "Checkpoint")), (stream, ("InsertStream", "SampleStream")))
            for name in names
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("deepmind.reverb.ReverbService", handlers),)
        )
        port = self._server.add_insecure_port(self.address or "localhost:0")
        self.address = f"localhost:{port}"
        self._server.start()

    def restart(self):
        self.stop()
        self.start()

    def stop(self):
        self._server.stop(0).wait(S)

    def ServerInfo(self, request, context):
        table = pb.TableInfo(name="replay", max_size=1000, max_times_sampled=1)
        return pb.ServerInfoResponse(tables_state_id=pb.Uint128(low=self.starts), table_info=[table])

    def Checkpoint(self, request, context):
        if self.is_full:
            context.abort(grpc.StatusCode.INTERNAL, "No space left on device")
        if self.dies_in_checkpoints:
            self.dies_in_checkpoints -= 1
            threading.Thread(target=self.restart).start()
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(S)
        return pb.CheckpointResponse(checkpoint_path="/there")

    def InsertStream(self, requests, context):
        there = set()
        for request in requests:
            there |= {chunk.chunk_key for chunk in request.chunks}
            columns = [column for item in request.items for column in item.flat_trajectory.columns]
            used = {piece.chunk_key for column in columns for piece in column.chunk_slices}
            if not used <= there or not set(request.keep_chunk_keys) <= there:
                context.abort(grpc.StatusCode.INTERNAL, f"{used - there} or {request.keep_chunk_keys} not in {there}")
            there = set(request.keep_chunk_keys)
            self.kept.append(len(there))
            yield pb.InsertStreamResponse(keys=[item.key for item in request.items])

    def SampleStream(self, requests, context):
        for _ in requests:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Rate Limiter: none here")
        yield from ()


def to_bytes(message):
    return message.SerializeToString()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def windows(sources, n):
    rows = np.arange(3 * n, 3 * n + 5)[None, :, None] + 100 * np.arange(sources)[:, None, None]
    return Unroll(rows, None, None, None, None), np.ones(sources), S, np.arange(sources)


@pytest.mark.parametrize("deaths", [0, 1])
def test_what_a_checkpoint_does_not_hold_stays_counted_if_the_server_dies_while_it_writes_one(server, deaths):
    replay = ReverbReplay(f"reverb://{server.address}", "replay")
    server.dies_in_checkpoints = deaths
    replay.insert(*windows(5, 0))
    replay.checkpoint()
    replay.insert(*windows(3, 1))
    assert replay.info()["replay/lost_upper_bound"] == 5 * deaths
    server.restart()
    replay.insert(*windows(1, 2))
    assert replay.info()["replay/lost_upper_bound"] == 5 * deaths + 3
    replay.close()


def test_a_run_goes_on_when_its_server_can_write_no_checkpoint(server, tmp_path, capsys):
    replay = ReverbReplay(f"reverb://{server.address}", "replay")
    snapshot = snapshot_of(Config(replay=f"reverb://{server.address}"), replay, tmp_path, None, False)
    for server.is_full in (True, True, False):
        snapshot()
    assert replay.info()["replay/failed_checkpoints"] == 2
    assert capsys.readouterr().out.count("INTERNAL: No space left on device") == 1
    replay.close()


def test_what_the_server_is_to_keep_is_encoded_once_for_each_item(server, monkeypatch):
    encoded = []

    def request(keep_chunk_keys):
        encoded.extend(keep_chunk_keys)
        return pb.InsertStreamRequest(keep_chunk_keys=keep_chunk_keys)

    monkeypatch.setattr(reverb_writer, "pb", types.SimpleNamespace(**{**vars(pb), "InsertStreamRequest": request}))
    replay = ReverbReplay(f"reverb://{server.address}", "replay", overlap=2, max_sources=60)
    for n in range(4):
        replay.insert(*windows(60, n))
    server.restart()  # which held what sources share
    for n in range(4, 8):
        replay.insert(*windows(60, n))
    replay.close()
    assert server.kept[-1] == max(server.kept) == 60
    assert 8 * 60 <= len(encoded) <= 8 * 60 + reverb_writer.MAX_UNACKED
