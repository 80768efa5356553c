from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_s",)
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    def __init__(self, every_s: _Optional[float] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("now",)
    NOW_FIELD_NUMBER: _ClassVar[int]
    now: bool
    def __init__(self, now: _Optional[bool] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("last_lines", "follow")
    LAST_LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    last_lines: int
    follow: bool
    def __init__(self, last_lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("text", "skipped")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    text: str
    skipped: int
    def __init__(self, text: _Optional[str] = ..., skipped: _Optional[int] = ...) -> None: ...

class LimitsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetLimitRequest(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    def __init__(self, limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("name", "value", "used", "meaning", "at_next_start")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MEANING_FIELD_NUMBER: _ClassVar[int]
    AT_NEXT_START_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    used: str
    meaning: str
    at_next_start: bool
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., used: _Optional[str] = ..., meaning: _Optional[str] = ..., at_next_start: _Optional[bool] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "reason", "uptime_s", "host", "traffic", "machine", "limits", "peers")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    uptime_s: float
    host: str
    traffic: Traffic
    machine: Machine
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., uptime_s: _Optional[float] = ..., host: _Optional[str] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("peer_id", "state", "reason", "name", "device", "run_name", "run_id", "place", "work", "audits", "addresses", "num_neighbours", "reach", "credit", "links")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    state: str
    reason: str
    name: str
    device: str
    run_name: str
    run_id: str
    place: Place
    work: Work
    audits: Audits
    addresses: _containers.RepeatedScalarFieldContainer[str]
    num_neighbours: int
    reach: Reach
    credit: Credit
    links: _containers.RepeatedCompositeFieldContainer[Link]
    def __init__(self, peer_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., name: _Optional[str] = ..., device: _Optional[str] = ..., run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., audits: _Optional[_Union[Audits, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., num_neighbours: _Optional[int] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("peer_id", "way")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    way: str
    def __init__(self, peer_id: _Optional[str] = ..., way: _Optional[str] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("tokens", "microbatches", "steps", "rank", "num_ranked")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    microbatches: int
    steps: int
    rank: int
    num_ranked: int
    def __init__(self, tokens: _Optional[int] = ..., microbatches: _Optional[int] = ..., steps: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranked: _Optional[int] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("kind", "why")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    why: str
    def __init__(self, kind: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("stage", "num_stages", "version", "total_steps", "num_members", "is_member", "standing", "local_steps", "inner_steps_taken", "window_left_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    stage: int
    num_stages: int
    version: int
    total_steps: int
    num_members: int
    is_member: bool
    standing: str
    local_steps: int
    inner_steps_taken: int
    window_left_s: float
    def __init__(self, stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., version: _Optional[int] = ..., total_steps: _Optional[int] = ..., num_members: _Optional[int] = ..., is_member: _Optional[bool] = ..., standing: _Optional[str] = ..., local_steps: _Optional[int] = ..., inner_steps_taken: _Optional[int] = ..., window_left_s: _Optional[float] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("computed", "certified_microbatches", "certified_tokens", "last_step", "last_step_tokens", "last_step_all_tokens", "rank", "num_ranked", "since_last_s", "tokens_per_s")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    CERTIFIED_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    CERTIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKED_FIELD_NUMBER: _ClassVar[int]
    SINCE_LAST_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    computed: int
    certified_microbatches: int
    certified_tokens: int
    last_step: int
    last_step_tokens: int
    last_step_all_tokens: int
    rank: int
    num_ranked: int
    since_last_s: float
    tokens_per_s: float
    def __init__(self, computed: _Optional[int] = ..., certified_microbatches: _Optional[int] = ..., certified_tokens: _Optional[int] = ..., last_step: _Optional[int] = ..., last_step_tokens: _Optional[int] = ..., last_step_all_tokens: _Optional[int] = ..., rank: _Optional[int] = ..., num_ranked: _Optional[int] = ..., since_last_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class Audits(_message.Message):
    __slots__ = ("passed", "made", "frauds_found")
    PASSED_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    FRAUDS_FOUND_FIELD_NUMBER: _ClassVar[int]
    passed: int
    made: int
    frauds_found: int
    def __init__(self, passed: _Optional[int] = ..., made: _Optional[int] = ..., frauds_found: _Optional[int] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("sent_bytes", "received_bytes", "month_bytes", "up_mbit", "down_mbit")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    UP_MBIT_FIELD_NUMBER: _ClassVar[int]
    DOWN_MBIT_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    received_bytes: int
    month_bytes: int
    up_mbit: float
    down_mbit: float
    def __init__(self, sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., month_bytes: _Optional[int] = ..., up_mbit: _Optional[float] = ..., down_mbit: _Optional[float] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("memory_bytes", "disk_bytes", "written_today_bytes", "cpu_cores")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_CORES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    disk_bytes: int
    written_today_bytes: int
    cpu_cores: float
    def __init__(self, memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., written_today_bytes: _Optional[int] = ..., cpu_cores: _Optional[float] = ...) -> None: ...
