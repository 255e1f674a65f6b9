"""Makes the harness of `unit.common` a plugin of every test below this directory."""

from unit.common import (  # noqa: F401
    pytest_collection,
    pytest_collection_finish,
    pytest_configure,
    pytest_pyfunc_call,
    pytest_sessionfinish,
)
