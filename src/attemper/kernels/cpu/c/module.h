// module.h: what the files of the extension share: Python's stable interface, what torch hands over once, and how the kernel runs.
#ifndef ATTEMPER_MODULE_H
#define ATTEMPER_MODULE_H
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED            // the stable interface is not there without the interpreter's lock
#define Py_LIMITED_API 0x030b0000  // one build serves Python 3.11 and every later version
#endif
#include <Python.h>

#include "call.h"
#include "tensors.h"

// Functions and types of torch, which `bind` gets by these names; native.py says where they are from.
#define BOUND(DO)                                                                                                                  \
    DO(Tensor) DO(Parameter) DO(exchange_api) DO(is_neg) DO(is_inference) DO(dispatch_modes) DO(function_modes) DO(functorch)      \
    DO(tracing) DO(profiling) DO(forward_ad) DO(grad_mode) DO(inference_mode) DO(any_autocast) DO(autocast) DO(autocast_dtype)     \
    DO(threads) DO(graph_task) DO(empty_like) DO(by_head) DO(new_empty) DO(new_empty_strided) DO(requires_grad) DO(current_level)   \
    DO(InputError) DO(changed) DO(read_in)
typedef struct {
#define DO(NAME) PyObject *NAME;
    BOUND(DO)
#undef DO
} Bound;
extern Bound bound;

extern struct How {  // set by `configure`
    int variant;
    int64_t poison;
    Parallel parallel;
} how;

// A method that takes its arguments by place.
#define METHOD(NAME) PyObject *NAME(PyObject *self, PyObject *const *args, Py_ssize_t count)
METHOD(py_guard);
METHOD(py_forward);
METHOD(py_write);
METHOD(py_backward);
METHOD(py_parts);
METHOD(py_fold);
// The functions that `op` gives: each takes what the op of this name takes, and is bound to what it hands other calls to.
METHOD(op_forward_packed);
METHOD(op_tally_packed);
METHOD(op_backward);

// Whether a function of torch without arguments returns this object; -1 with an error set.
int returns(PyObject *function, PyObject *wanted);
// Whether a method got as many arguments as it takes; otherwise the error is set.
int takes(const char *name, Py_ssize_t wanted, Py_ssize_t count);
// Whether a call is plain, and recorded; 0 too for an error, which is set.
enum { PLAIN = 1, RECORDED = 2 };  // as in guard.py
int judge(PyObject *const *tensors, Py_ssize_t count);
// The same for an op on the kernel `cpu`: without additive scores, sink, documents, dropout and its seed. An error is not set.
int is_plain_op(PyObject *const *problem, PyObject *kernel, PyObject *const *tensors, Py_ssize_t count);
// Call a function of Python with these arguments, whatever error was set.
PyObject *hand_on(PyObject *to, PyObject *const *args, Py_ssize_t count);
// Set the error of a pass that failed.
void set_failure(const char *pass, int failed);
// Set threads, parallel and poison of a call; 0 with an error set if torch does not say how many threads there are.
int set_threads(Call *call);
#endif
