from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Run(_message.Message):
    __slots__ = ("signed_run", "protocol", "release", "minimum_release", "admission")
    SIGNED_RUN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_RELEASE_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    signed_run: bytes
    protocol: int
    release: str
    minimum_release: str
    admission: str
    def __init__(self, signed_run: _Optional[bytes] = ..., protocol: _Optional[int] = ..., release: _Optional[str] = ..., minimum_release: _Optional[str] = ..., admission: _Optional[str] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    def __init__(self, stage: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("peer_id", "stage", "version", "present", "num_tokens", "num_microbatches", "num_steps", "rank", "num_direct", "num_punched", "num_relayed")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_DIRECT_FIELD_NUMBER: _ClassVar[int]
    NUM_PUNCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RELAYED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    stage: int
    version: int
    present: bool
    num_tokens: int
    num_microbatches: int
    num_steps: int
    rank: int
    num_direct: int
    num_punched: int
    num_relayed: int
    def __init__(self, peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., version: _Optional[int] = ..., present: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., num_steps: _Optional[int] = ..., rank: _Optional[int] = ..., num_direct: _Optional[int] = ..., num_punched: _Optional[int] = ..., num_relayed: _Optional[int] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class CheckpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Checkpoints(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("version", "name", "offset")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    offset: int
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stage(_message.Message):
    __slots__ = ("stage", "version", "num_present", "num_missing")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PRESENT_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_FIELD_NUMBER: _ClassVar[int]
    stage: int
    version: int
    num_present: int
    num_missing: int
    def __init__(self, stage: _Optional[int] = ..., version: _Optional[int] = ..., num_present: _Optional[int] = ..., num_missing: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("run_id", "name", "version", "total_steps", "stages", "num_tokens", "tokens_per_s", "loss", "held_out_loss", "num_events", "books")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    version: int
    total_steps: int
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    num_tokens: int
    tokens_per_s: float
    loss: float
    held_out_loss: float
    num_events: int
    books: bytes
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., total_steps: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., held_out_loss: _Optional[float] = ..., num_events: _Optional[int] = ..., books: _Optional[bytes] = ...) -> None: ...
