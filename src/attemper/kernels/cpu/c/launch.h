// launch.h: a kernel of a GPU, started as Triton 3.6 starts it; the driver's functions are pointers, so nothing of CUDA is linked.
#ifndef ATTEMPER_LAUNCH_H
#define ATTEMPER_LAUNCH_H
#include "module.h"

int launch_bind(PyObject *module);  // makes the type; -1 with an error set

METHOD(py_plan);
METHOD(py_replay_checked);
METHOD(py_replay);
METHOD(py_forget);
#endif
