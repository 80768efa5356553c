from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NoticesRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class Notices(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("to", "skip")
    TO_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    to: str
    skip: str
    def __init__(self, to: _Optional[str] = ..., skip: _Optional[str] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AmendRequest(_message.Message):
    __slots__ = ("changes", "at", "only_show")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ONLY_SHOW_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedScalarFieldContainer[str]
    at: str
    only_show: bool
    def __init__(self, changes: _Optional[_Iterable[str]] = ..., at: _Optional[str] = ..., only_show: _Optional[bool] = ...) -> None: ...

class Amended(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateVoucherRequest(_message.Message):
    __slots__ = ("uses", "days", "note")
    USES_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    uses: int
    days: float
    note: str
    def __init__(self, uses: _Optional[int] = ..., days: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class NewVoucher(_message.Message):
    __slots__ = ("secret",)
    SECRET_FIELD_NUMBER: _ClassVar[int]
    secret: str
    def __init__(self, secret: _Optional[str] = ...) -> None: ...

class VouchersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Voucher(_message.Message):
    __slots__ = ("name", "note", "uses", "used_by", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    USED_BY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    note: str
    uses: int
    used_by: _containers.RepeatedScalarFieldContainer[str]
    state: str
    def __init__(self, name: _Optional[str] = ..., note: _Optional[str] = ..., uses: _Optional[int] = ..., used_by: _Optional[_Iterable[str]] = ..., state: _Optional[str] = ...) -> None: ...

class Vouchers(_message.Message):
    __slots__ = ("vouchers",)
    VOUCHERS_FIELD_NUMBER: _ClassVar[int]
    vouchers: _containers.RepeatedCompositeFieldContainer[Voucher]
    def __init__(self, vouchers: _Optional[_Iterable[_Union[Voucher, _Mapping]]] = ...) -> None: ...

class RevokeVoucherRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokedVoucher(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...
