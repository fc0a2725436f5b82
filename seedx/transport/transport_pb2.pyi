from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReceiveRequest(_message.Message):
    __slots__ = ("protocol", "newer_than", "wait_s", "held", "writer")
    class Held(_message.Message):
        __slots__ = ("writer", "version")
        WRITER_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        writer: bytes
        version: int
        def __init__(self, writer: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    newer_than: int
    wait_s: float
    held: ReceiveRequest.Held
    writer: bytes
    def __init__(self, protocol: _Optional[int] = ..., newer_than: _Optional[int] = ..., wait_s: _Optional[float] = ..., held: _Optional[_Union[ReceiveRequest.Held, _Mapping]] = ..., writer: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("protocol", "writer", "version", "base", "checksums", "tensors")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    writer: bytes
    version: int
    base: int
    checksums: bool
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, protocol: _Optional[int] = ..., writer: _Optional[bytes] = ..., version: _Optional[int] = ..., base: _Optional[int] = ..., checksums: bool = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("path", "dtype", "shape", "encoding", "payload_bytes")
    class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FULL: _ClassVar[Tensor.Encoding]
        UNCHANGED: _ClassVar[Tensor.Encoding]
        SPARSE: _ClassVar[Tensor.Encoding]
        XOR: _ClassVar[Tensor.Encoding]
    FULL: Tensor.Encoding
    UNCHANGED: Tensor.Encoding
    SPARSE: Tensor.Encoding
    XOR: Tensor.Encoding
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    encoding: Tensor.Encoding
    payload_bytes: int
    def __init__(self, path: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., encoding: _Optional[_Union[Tensor.Encoding, str]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...
