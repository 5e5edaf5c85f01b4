/* A small persistent thread pool: one job at a time, chunks claimed with an atomic counter.
 *
 * Why not OpenMP: a decode step is some 200 short jobs, and a libgomp team that sleeps between them pays a wake-up each
 * (or burns a core for ever). Here a worker spins for a moment after each job and then sleeps on a futex; the caller never
 * waits for a sleeping worker, it does the chunks itself and only waits for workers that have entered the job.
 *
 * Results never depend on who computes a chunk: every op writes each output element from exactly one chunk, in one
 * canonical order (vec.h). fork(): threads do not survive it, so the child starts with an empty pool and makes its own. */
#ifndef APPLIANCE_POOL_H
#define APPLIANCE_POOL_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define POOL_MAX_THREADS 256
#define POOL_SPINS 4000 /* about 40-100 us of PAUSE: longer than the gap between two ops of a step */

typedef void (*chunk_fn)(void *ctx, int64_t chunk, int slot);

struct pool_job {
    chunk_fn fn;
    void *ctx;
    int64_t num_chunks;
    int max_slot; /* workers with a higher slot stay out: the caller asked for fewer threads */
    _Atomic int64_t next;
};

static struct {
    pthread_mutex_t lock; /* one job at a time */
    _Atomic(struct pool_job *) job;
    _Atomic uint32_t sequence; /* futex word of the workers: changes with every job and at shutdown */
    _Atomic uint32_t active;   /* workers that may hold `job`; futex word of the caller, woken when it falls to 0 */
    _Atomic int sleeping, waiting, stop;
    int num_workers;
    pthread_t threads[POOL_MAX_THREADS];
    void *scratch[POOL_MAX_THREADS];
    size_t scratch_bytes[POOL_MAX_THREADS];
    int atfork_installed;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline void pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void pool_futex(_Atomic uint32_t *word, int op, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void pool_work(struct pool_job *job, int slot) {
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (chunk >= job->num_chunks) return;
        job->fn(job->ctx, chunk, slot);
    }
}

/* `active` goes up before `job` is read and the caller clears `job` before it reads `active` (both sequentially
 * consistent), so either the worker sees NULL or the caller sees the worker: the job never dies under a worker. */
static void *pool_worker(void *arg) {
    int slot = (int)(intptr_t)arg;
    uint32_t seen = 0;
    while (!atomic_load(&pool.stop)) {
        uint32_t sequence = atomic_load(&pool.sequence);
        for (int spin = 0; sequence == seen && spin < POOL_SPINS; spin++) {
            pool_pause();
            sequence = atomic_load_explicit(&pool.sequence, memory_order_acquire);
        }
        if (sequence == seen) {
            atomic_fetch_add(&pool.sleeping, 1);
            pool_futex(&pool.sequence, FUTEX_WAIT, seen);
            atomic_fetch_sub(&pool.sleeping, 1);
            continue;
        }
        seen = sequence;
        atomic_fetch_add(&pool.active, 1);
        struct pool_job *job = atomic_load(&pool.job);
        if (job && slot <= job->max_slot) pool_work(job, slot);
        if (atomic_fetch_sub(&pool.active, 1) == 1 && atomic_load(&pool.waiting)) pool_futex(&pool.active, FUTEX_WAKE, 1);
    }
    return NULL;
}

/* The caller's end of a job. A worker that is still in it after a while has lost its core to another process, perhaps to
 * this very thread: sleep then, do not spin. */
static void pool_wait(void) {
    for (int spin = 0; spin < POOL_SPINS && atomic_load(&pool.active); spin++) pool_pause();
    if (!atomic_load(&pool.active)) return;
    atomic_store(&pool.waiting, 1);
    for (uint32_t active; (active = atomic_load(&pool.active));) pool_futex(&pool.active, FUTEX_WAIT, active);
    atomic_store(&pool.waiting, 0);
}

static void pool_fork_child(void) {
    pthread_mutex_init(&pool.lock, NULL);
    atomic_store(&pool.job, NULL);
    atomic_store(&pool.active, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.waiting, 0);
    atomic_store(&pool.stop, 0);
    pool.num_workers = 0;
    /* Scratch of the parent's threads is kept: it is plain memory, copied by fork. */
}

/* Signals belong to Python's main thread. */
static int pool_grow(int num_workers) {
    if (!pool.atfork_installed) {
        int rc = pthread_atfork(NULL, NULL, pool_fork_child);
        if (rc) return rc;
        pool.atfork_installed = 1;
    }
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    while (pool.num_workers < num_workers) {
        rc = pthread_create(&pool.threads[pool.num_workers], NULL, pool_worker, (void *)(intptr_t)(pool.num_workers + 1));
        if (rc) break;
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

static int pool_reserve_scratch(int num_threads, size_t bytes) {
    for (int slot = 0; slot < num_threads; slot++) {
        if (pool.scratch_bytes[slot] >= bytes) continue;
        void *fresh = NULL;
        if (posix_memalign(&fresh, 64, bytes)) return ENOMEM;
        free(pool.scratch[slot]);
        pool.scratch[slot] = fresh;
        pool.scratch_bytes[slot] = bytes;
    }
    return 0;
}

/* Runs fn(ctx, chunk, slot) for chunk 0..num_chunks-1 on up to num_threads threads, the caller being slot 0. scratch(slot)
 * is at least scratch_bytes long and 64-byte aligned. Returns 0 or an errno; then nothing ran. Call without the GIL. */
static int pool_run(int num_threads, chunk_fn fn, void *ctx, int64_t num_chunks, size_t scratch_bytes) {
    if (num_chunks <= 0) return 0;
    if (num_threads > num_chunks) num_threads = (int)num_chunks;
    pthread_mutex_lock(&pool.lock);
    int rc = pool_reserve_scratch(num_threads, scratch_bytes);
    if (!rc && num_threads - 1 > pool.num_workers) rc = pool_grow(num_threads - 1);
    if (!rc) {
        struct pool_job job = {.fn = fn, .ctx = ctx, .num_chunks = num_chunks, .max_slot = num_threads - 1};
        if (num_threads > 1) {
            atomic_store(&pool.job, &job);
            atomic_fetch_add(&pool.sequence, 1);
            if (atomic_load(&pool.sleeping) > 0) pool_futex(&pool.sequence, FUTEX_WAKE, INT_MAX);
        }
        pool_work(&job, 0);
        if (num_threads > 1) {
            atomic_store(&pool.job, NULL);
            pool_wait();
        }
    }
    pthread_mutex_unlock(&pool.lock);
    return rc;
}

static void pool_shutdown(void) {
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.stop, 1);
    atomic_fetch_add(&pool.sequence, 1);
    pool_futex(&pool.sequence, FUTEX_WAKE, INT_MAX);
    for (int i = 0; i < pool.num_workers; i++) pthread_join(pool.threads[i], NULL);
    pool.num_workers = 0;
    atomic_store(&pool.stop, 0);
    for (int slot = 0; slot < POOL_MAX_THREADS; slot++) {
        free(pool.scratch[slot]);
        pool.scratch[slot] = NULL;
        pool.scratch_bytes[slot] = 0;
    }
    pthread_mutex_unlock(&pool.lock);
}

#endif
