from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HopMessage(_message.Message):
    __slots__ = ("type", "reservation", "limit", "status")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RESERVE: _ClassVar[HopMessage.Type]
        CONNECT: _ClassVar[HopMessage.Type]
        STATUS: _ClassVar[HopMessage.Type]
    RESERVE: HopMessage.Type
    CONNECT: HopMessage.Type
    STATUS: HopMessage.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    type: HopMessage.Type
    reservation: Reservation
    limit: Limit
    status: int
    def __init__(self, type: _Optional[_Union[HopMessage.Type, str]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ..., limit: _Optional[_Union[Limit, _Mapping]] = ..., status: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("expire",)
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    expire: int
    def __init__(self, expire: _Optional[int] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("duration", "data")
    DURATION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    duration: int
    data: int
    def __init__(self, duration: _Optional[int] = ..., data: _Optional[int] = ...) -> None: ...
