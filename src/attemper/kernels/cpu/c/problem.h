// problem.h: a call as Python gives it, read and checked.
#ifndef ATTEMPER_PROBLEM_H
#define ATTEMPER_PROBLEM_H
#include "module.h"

// Each returns 0, without an error, if a tensor does not fit the others or is on another device: that of the call, or if it has none
// (0) that of the query. `value`, `mask` and `gain` may be None.
int read_vectors(PyObject *query, PyObject *key, PyObject *value, Call *call);
int read_mask(PyObject *mask, Call *call);
// The gain: one number, one per head, (B, H, Lq), or (B or 1, H or 1, Lq or 1, 1), in the dtype of measuring
int read_gain(PyObject *gain, Call *call);
// The tensors and numbers that a user asks for, as `forward` takes them up to `grouped`, checked; the bits of signs are not read
int read_asked(PyObject *const *args, Call *call);
// The numbers of a checked problem from its seed on: seed, left, right, scale, softcap, dropout. 0 with an error set.
int read_numbers(PyObject *const *numbers, Call *call);
static inline int64_t measuring_dtype(const Call *call) { return call->dtype == F64 ? F64 : F32; }

// Contiguous memory in the shape and dtype of a tensor, from torch
PyObject *empty_like(PyObject *tensor);
#endif
