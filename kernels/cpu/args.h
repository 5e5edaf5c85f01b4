/* Buffer arguments of the ops: taken, checked and released. Every op names its arrays and sizes in one table, and nothing
 * is read before dtype, contiguity, alignment, every shape and every index have been checked. */
#ifndef APPLIANCE_ARGS_H
#define APPLIANCE_ARGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MAX_ARRAYS 16

struct arrays {
    const char *op;
    int count;
    Py_buffer view[MAX_ARRAYS];
    const char *name[MAX_ARRAYS];
    int writable[MAX_ARRAYS];
};

static void arrays_release(struct arrays *a) {
    for (int i = 0; i < a->count; i++) PyBuffer_Release(&a->view[i]);
    a->count = 0;
}

/* kinds: 'f' float32, 'b' uint16 holding bf16, 'i' int32; "fb" accepts either of two. NULL with an exception on error. */
static Py_buffer *take(struct arrays *a, PyObject *object, const char *name, const char *kinds, int ndim, int writable) {
    Py_buffer *view = &a->view[a->count];
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_Format(type ? type : PyExc_TypeError, "%s: %s must be a C-contiguous%s array: %S", a->op, name,
                     writable ? " writable" : "", value ? value : Py_None);
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
        return NULL;
    }
    a->name[a->count] = name;
    a->writable[a->count++] = writable;
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == '<') format++;
    char kind = 0;
    if (!strcmp(format, "f") && view->itemsize == 4) kind = 'f';
    if (!strcmp(format, "H") && view->itemsize == 2) kind = 'b';
    if ((!strcmp(format, "i") || !strcmp(format, "l")) && view->itemsize == 4) kind = 'i';
    if (!kind || !strchr(kinds, kind)) {
        PyErr_Format(PyExc_TypeError, "%s: %s has element format '%s'; wanted %s", a->op, name,
                     view->format ? view->format : "B",
                     strcmp(kinds, "i") == 0 ? "int32" : strcmp(kinds, "f") == 0 ? "float32" : "float32 or uint16 (bf16)");
        return NULL;
    }
    if (view->ndim != ndim) {
        PyErr_Format(PyExc_ValueError, "%s: %s has %d dimensions; wanted %d", a->op, name, view->ndim, ndim);
        return NULL;
    }
    if ((uintptr_t)view->buf % (uintptr_t)view->itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: %s is not aligned to its element size", a->op, name);
        return NULL;
    }
    return view;
}

static int is_bf16(const Py_buffer *view) { return view->itemsize == 2; }

static int want(const struct arrays *a, const Py_buffer *view, int axis, Py_ssize_t size) {
    if (view->shape[axis] == size) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %s has size %zd along axis %d; wanted %zd", a->op, a->name[view - a->view],
                 view->shape[axis], axis, size);
    return -1;
}

/* Threads write the outputs while others read: an output must not share memory with any other argument. */
static int no_overlap(const struct arrays *a) {
    for (int i = 0; i < a->count; i++) {
        if (!a->writable[i]) continue;
        const char *lo = a->view[i].buf, *hi = lo + a->view[i].len;
        for (int j = 0; j < a->count; j++) {
            const char *other = a->view[j].buf;
            if (i != j && a->view[j].len && a->view[i].len && lo < other + a->view[j].len && other < hi) {
                PyErr_Format(PyExc_ValueError, "%s: %s and %s overlap in memory", a->op, a->name[i], a->name[j]);
                return -1;
            }
        }
    }
    return 0;
}

static int take_threads(struct arrays *a, PyObject *object, int *threads) {
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < 1 || value > POOL_MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "%s: num_threads is %ld; wanted 1..%d", a->op, value, POOL_MAX_THREADS);
        return -1;
    }
    *threads = (int)value;
    return 0;
}

static int take_float(PyObject *object, float *out) {
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) return -1;
    *out = (float)value;
    return 0;
}

/* Releases the arrays and turns the rc of pool_run into None or an exception. */
static PyObject *finish(struct arrays *a, int rc) {
    arrays_release(a);
    if (rc == 0) Py_RETURN_NONE;
    if (rc == ENOMEM) return PyErr_NoMemory();
    errno = rc;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *fail(struct arrays *a) {
    arrays_release(a);
    return NULL;
}

#endif
