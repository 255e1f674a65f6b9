// Lion on the host: the rule for every instruction set, as a Python module.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "host_update/host_update.h"

#define DS_RULE "lion/lion_rule.h"
#include "host_update/each_isa.h"
#include "host_update/module.h"
