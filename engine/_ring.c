/* Single-producer single-consumer byte ring in shared memory, for the two engine processes (see engine/ring.py).
 *
 * Layout (little endian, each counter alone on its cache line so that the two sides do not fight over one):
 *   0    u64 magic
 *   8    u64 capacity of the data area in bytes, a power of two
 *   64   u64 head: bytes ever written, stored by the producer only (release)
 *   128  u64 tail: bytes ever read, stored by the consumer only (release)
 *   192  data; a frame is u32 length, u32 check (~length), payload, padding to 8 bytes; frames wrap around the end.
 *        A skip frame (u32 all ones, u32 SKIP) fills the rest up to the end
 *
 * A producer that finds the ring empty starts again at its beginning, so that light traffic keeps reusing the same few
 * pages instead of walking through, and so taking, all of the memory.
 *
 * Plain Python cannot promise that the payload is visible before the counter on every CPU; C11 acquire/release does.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAGIC 0x474e52454c505041ull /* "APPLERNG" */
#define HEADER 192
#define FRAME_HEAD 8
#define SKIP 0x50494b53u
#define RESTART_BYTES (256u << 10) /* an empty ring is restarted once it has walked this far */

typedef struct {
    Py_buffer view;
    uint64_t capacity;
    uint64_t *head, *tail;
    uint8_t *data;
} Ring;

static int ring_open(PyObject *object, Ring *ring)
{
    if (PyObject_GetBuffer(object, &ring->view, PyBUF_WRITABLE) < 0)
        return -1;
    uint8_t *base = ring->view.buf;
    uint64_t magic = 0, capacity = 0;
    if (ring->view.len > HEADER && ((uintptr_t)base & 7) == 0) {
        memcpy(&magic, base, 8);
        memcpy(&capacity, base + 8, 8);
    }
    if (magic != MAGIC || capacity == 0 || (capacity & (capacity - 1)) || capacity > (uint64_t)(ring->view.len - HEADER)) {
        PyBuffer_Release(&ring->view);
        PyErr_SetString(PyExc_ValueError, "not a ring: call format() on the shared memory first");
        return -1;
    }
    ring->capacity = capacity;
    ring->head = (uint64_t *)(base + 64);
    ring->tail = (uint64_t *)(base + 128);
    ring->data = base + HEADER;
    return 0;
}

static void copy_in(Ring *ring, uint64_t at, const void *from, uint64_t len)
{
    uint64_t offset = at & (ring->capacity - 1), first = ring->capacity - offset;
    if (first > len)
        first = len;
    memcpy(ring->data + offset, from, first);
    memcpy(ring->data, (const uint8_t *)from + first, len - first);
}

static void copy_out(Ring *ring, uint64_t at, void *to, uint64_t len)
{
    uint64_t offset = at & (ring->capacity - 1), first = ring->capacity - offset;
    if (first > len)
        first = len;
    memcpy(to, ring->data + offset, first);
    memcpy((uint8_t *)to + first, ring->data, len - first);
}

static PyObject *py_format(PyObject *self, PyObject *args)
{
    PyObject *object;
    if (!PyArg_ParseTuple(args, "O", &object))
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    uint64_t capacity = 1;
    while (view.len > HEADER && capacity * 2 <= (uint64_t)(view.len - HEADER))
        capacity *= 2;
    if (view.len <= HEADER || capacity < 64) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "shared memory too small for a ring");
        return NULL;
    }
    uint64_t magic = MAGIC;
    memset(view.buf, 0, HEADER);
    memcpy((uint8_t *)view.buf + 8, &capacity, 8);
    memcpy(view.buf, &magic, 8);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(capacity);
}

static PyObject *py_push(PyObject *self, PyObject *args)
{
    PyObject *object;
    Py_buffer payload;
    if (!PyArg_ParseTuple(args, "Oy*", &object, &payload))
        return NULL;
    Ring ring;
    if (ring_open(object, &ring) < 0) {
        PyBuffer_Release(&payload);
        return NULL;
    }
    PyObject *result = NULL;
    uint64_t len = (uint64_t)payload.len, need = (FRAME_HEAD + len + 7) & ~7ull;
    uint64_t head = __atomic_load_n(ring.head, __ATOMIC_RELAXED);
    uint64_t used = head - __atomic_load_n(ring.tail, __ATOMIC_ACQUIRE);
    if (len >= UINT32_MAX || need > ring.capacity) {
        PyErr_Format(PyExc_ValueError, "a frame of %zd bytes can never fit a ring of %llu", payload.len,
                     (unsigned long long)ring.capacity);
    } else if (used > ring.capacity) {
        PyErr_SetString(PyExc_RuntimeError, "ring counters are damaged");
    } else if (need > ring.capacity - used) {
        result = Py_NewRef(Py_False);
    } else {
        uint64_t offset = head & (ring.capacity - 1);
        if (used == 0 && offset >= RESTART_BYTES && need <= offset) {
            uint32_t skip[2] = {UINT32_MAX, SKIP};
            copy_in(&ring, head, skip, FRAME_HEAD);
            head += ring.capacity - offset;
        }
        uint32_t frame[2] = {(uint32_t)len, ~(uint32_t)len};
        copy_in(&ring, head, frame, FRAME_HEAD);
        copy_in(&ring, head + FRAME_HEAD, payload.buf, len);
        __atomic_store_n(ring.head, head + need, __ATOMIC_RELEASE);
        result = Py_NewRef(Py_True);
    }
    PyBuffer_Release(&ring.view);
    PyBuffer_Release(&payload);
    return result;
}

static PyObject *py_pop(PyObject *self, PyObject *args)
{
    PyObject *object;
    if (!PyArg_ParseTuple(args, "O", &object))
        return NULL;
    Ring ring;
    if (ring_open(object, &ring) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t tail = __atomic_load_n(ring.tail, __ATOMIC_RELAXED);
    uint64_t used = __atomic_load_n(ring.head, __ATOMIC_ACQUIRE) - tail;
    if (used == 0) {
        result = Py_NewRef(Py_None);
    } else {
        uint32_t frame[2] = {0, 0};
        if (used >= FRAME_HEAD && used <= ring.capacity)
            copy_out(&ring, tail, frame, FRAME_HEAD);
        uint64_t rest = ring.capacity - (tail & (ring.capacity - 1));
        if (frame[0] == UINT32_MAX && frame[1] == SKIP && rest + FRAME_HEAD <= used) {
            tail += rest;
            used -= rest;
            copy_out(&ring, tail, frame, FRAME_HEAD);
        }
        uint64_t len = frame[0], need = (FRAME_HEAD + len + 7) & ~7ull;
        if (used > ring.capacity || frame[0] != ~frame[1] || need > used) {
            PyErr_SetString(PyExc_RuntimeError, "ring contents are damaged");
        } else {
            result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
            if (result != NULL) {
                copy_out(&ring, tail + FRAME_HEAD, PyBytes_AS_STRING(result), len);
                __atomic_store_n(ring.tail, tail + need, __ATOMIC_RELEASE);
            }
        }
    }
    PyBuffer_Release(&ring.view);
    return result;
}

static PyMethodDef methods[] = {
    {"format", py_format, METH_VARARGS, "format(buffer) -> capacity in bytes. Makes an empty ring of the buffer."},
    {"push", py_push, METH_VARARGS, "push(buffer, payload) -> bool. False when there is no room now."},
    {"pop", py_pop, METH_VARARGS, "pop(buffer) -> bytes or None when empty."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ring", "Byte ring in shared memory.", -1, methods};

PyMODINIT_FUNC PyInit__ring(void)
{
    return PyModule_Create(&module);
}
