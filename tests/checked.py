"""The type checker that conftest.py puts on every function of seedx: beartype, to which an int is a float (PEP 484)."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
