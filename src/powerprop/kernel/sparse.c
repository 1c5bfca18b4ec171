/* Products with sparse matrices, activations as [features, batch]: the unit of work is one weight times a contiguous batch.

   Forward, each weight is one multiply-add of a row of x into sums that stay in registers. Backward, one pass over the
   transposed pattern gives both gradients, because both read the same row of g = ∂L/∂y. Every row of the result belongs to
   one thread, so that sums have one order whatever the number of threads. Vectors of 16 floats are split by the compiler
   where registers are narrower. `sparse/pattern.py` and `sparse/products.py` check whatever arrives here. */

#include "lanes.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { TILE = 4 };
typedef float Half __attribute__((vector_size(32), aligned(4)));
typedef float Quarter __attribute__((vector_size(16), aligned(4)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (__attribute__((vector_size(16))) int32_t){__VA_ARGS__})
#endif

INLINE Quarter folded(Lanes v) {
    Half h[2];
    Quarter q[2];
    memcpy(h, &v, sizeof v);
    h[0] += h[1];
    memcpy(q, h, sizeof q);
    return q[0] + q[1];
}
INLINE float sum(Lanes v) {
    Quarter q = folded(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
/* The sums of four vectors, each in the order of `sum`. */
INLINE Quarter sums_of(const Lanes *v) {
    Quarter a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
    Quarter low = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7); /* a0 b0 a1 b1 + a2 b2 a3 b3 */
    Quarter high = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
}

/* Rows ptr[i] .. ptr[i + 1] of indices; `at` tells where in the values each one's is, NULL that they lie in this order. */
typedef struct { const int32_t *ptr, *index, *at; } Rows;

/* How far apart in memory rows are: of what the indices count (1 where these are distances), of y or x, and of dx. */
typedef struct { int64_t index, row, out; } Steps;

/* y[i] = b[i] + Σ v·x[index], for `wide` vectors of columns */
INLINE void forward_tile(Rows p, const float *v, const float *x, float *y, const float *b, int64_t from, int64_t to,
                         Steps by, int relu, const int wide) {
    for (int64_t i = from; i < to; i++) {
        Lanes sums[TILE];
        for (int r = 0; r < wide; r++) sums[r] = (Lanes){0} + (b ? b[i] : 0.0f);
        for (int32_t k = p.ptr[i]; k < p.ptr[i + 1]; k++) {
            const float *row = x + p.index[k] * by.index, w = v[k];
            for (int r = 0; r < wide; r++) sums[r] += w * load(row + LANES * r);
        }
        for (int r = 0; r < wide; r++) {
            if (relu) sums[r] = positive(sums[r]);
            store(y + i * by.out + LANES * r, sums[r]);
        }
    }
}

/* One weight of a row: sums += v·g[index]; returns what adds up to the gradient of the weight. */
INLINE Lanes one_weight(Rows p, const float *v, const float *g, const Lanes *here, Lanes *sums, int32_t k, int64_t by,
                        const int wide, const int both) {
    const float *row = g + p.index[k] * by, w = both ? v[p.at[k]] : 0.0f;
    Lanes dot = {0};
    for (int r = 0; r < wide; r++) {
        Lanes part = load(row + LANES * r);
        dot += here[r] * part;
        if (both) sums[r] += w * part;
    }
    return dot;
}

/* dv (+)= x[j]·g[index] and, with dx, dx[j] = Σ v·g[index]; `fresh`: the lanes of the tile that no tile before had */
INLINE void backward_tile(Rows p, const float *v, const float *x, const float *g, float *dx, float *dv, int64_t from,
                          int64_t to, Steps by, int add, Bits fresh, const int wide, const int both) {
    for (int64_t j = from; j < to; j++) {
        Lanes sums[TILE], here[TILE];
        for (int r = 0; r < wide; r++) sums[r] = (Lanes){0}, here[r] = load(x + j * by.row + LANES * r);
        if (wide == 1) here[0] = (Lanes)((Bits)here[0] & fresh);
        int32_t k = p.ptr[j];
        for (; k + 4 <= p.ptr[j + 1]; k += 4) {
            Lanes dots[4];
            for (int i = 0; i < 4; i++) dots[i] = one_weight(p, v, g, here, sums, k + i, by.index, wide, both);
            Quarter four = sums_of(dots);
            for (int i = 0; i < 4; i++) {
                float *out = dv + p.at[k + i];
                *out = add ? *out + four[i] : four[i];
            }
        }
        for (; k < p.ptr[j + 1]; k++) {
            float *out = dv + p.at[k], dot = sum(one_weight(p, v, g, here, sums, k, by.index, wide, both));
            *out = add ? *out + dot : dot;
        }
        if (both) for (int r = 0; r < wide; r++) store(dx + j * by.out + LANES * r, sums[r]);
    }
}

/* Tiles of 64, 32 and 16 columns; the last one overlaps the one before it where the batch is no multiple of 16. */
CLONES static void forward_rows(Rows p, const float *v, const float *x, float *y, const float *b, int64_t from, int64_t to,
                                int64_t n, Steps by, int relu) {
    int64_t c = 0;
    for (; c + 64 <= n; c += 64) forward_tile(p, v, x + c, y + c, b, from, to, by, relu, 4);
    if (c + 32 <= n) forward_tile(p, v, x + c, y + c, b, from, to, by, relu, 2), c += 32;
    if (c + 16 <= n) forward_tile(p, v, x + c, y + c, b, from, to, by, relu, 1), c += 16;
    if (c < n) forward_tile(p, v, x + n - 16, y + n - 16, b, from, to, by, relu, 1);
}

INLINE void backward_tiles(Rows p, const float *v, const float *x, const float *g, float *dx, float *dv, int64_t from,
                           int64_t to, int64_t n, Steps by, int add, const int both) {
    Bits all = ~(Bits){0}, last = all;
    int64_t c = 0;
    for (; c + 64 <= n; c += 64) backward_tile(p, v, x + c, g + c, dx + c, dv, from, to, by, add || c, all, 4, both);
    if (c + 32 <= n) backward_tile(p, v, x + c, g + c, dx + c, dv, from, to, by, add || c, all, 2, both), c += 32;
    if (c + 16 <= n) backward_tile(p, v, x + c, g + c, dx + c, dv, from, to, by, add || c, all, 1, both), c += 16;
    for (int l = 0; l < LANES - (n - c); l++) last[l] = 0;
    c = n - 16;
    if (n % 16) backward_tile(p, v, x + c, g + c, dx + c, dv, from, to, by, 1, last, 1, both);
}
CLONES static void backward_rows(Rows p, const float *v, const float *x, const float *g, float *dx, float *dv, int64_t from,
                                 int64_t to, int64_t n, Steps by, int add) {
    backward_tiles(p, v, x, g, dx, dv, from, to, n, by, add, 1);
}
CLONES static void gradient_rows(Rows p, const float *x, const float *g, float *dv, int64_t from, int64_t to, int64_t n,
                                 Steps by, int add) {
    backward_tiles(p, NULL, x, g, dv, dv, from, to, n, by, add, 0);
}
CLONES static void sum_rows(const float *g, float *db, int64_t from, int64_t to, int64_t n) {
    for (int64_t i = from; i < to; i++) {
        Lanes sums[TILE] = {{0}};
        float rest = 0;
        int64_t c = 0;
        for (; c + LANES * TILE <= n; c += LANES * TILE)
            for (int r = 0; r < TILE; r++) sums[r] += load(g + i * n + c + LANES * r);
        for (; c + LANES <= n; c += LANES) sums[0] += load(g + i * n + c);
        for (; c < n; c++) rest += g[i * n + c];
        db[i] = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
    }
}

/* The first row of a share: rows are shared out so that every thread has as many weights. */
static int64_t share(const int32_t *ptr, int64_t rows, int64_t part, int64_t parts) {
    int64_t goal = (ptr[rows] + rows) * part / parts, low = 0, high = rows;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ptr[middle] + middle < goal) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* n, the batch, is at least 16. */
void powerprop_sparse_forward(const int32_t *ptr, const int32_t *index, const float *v, const float *x, float *y,
                              const float *b, int64_t rows, int64_t n, int relu, int threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++)
        forward_rows((Rows){ptr, index, NULL}, v, x, y, b, share(ptr, rows, t, threads), share(ptr, rows, t + 1, threads), n,
                     (Steps){n, 0, n}, relu);
}

/* The transposed pattern. dx = ∂L/∂x and db = ∂L/∂b, the sums of the `outs` rows of g, may be NULL. */
void powerprop_sparse_backward(const int32_t *ptr, const int32_t *index, const int32_t *at, const float *v, const float *x,
                               const float *g, float *dx, float *dv, float *db, int64_t outs, int64_t rows, int64_t n,
                               int threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        int64_t from = share(ptr, rows, t, threads), to = share(ptr, rows, t + 1, threads);
        if (db) sum_rows(g, db, outs * t / threads, outs * (t + 1) / threads, n);
        if (dx) backward_rows((Rows){ptr, index, at}, v, x, g, dx, dv, from, to, n, (Steps){n, n, n}, 0);
        else gradient_rows((Rows){ptr, index, at}, x, g, dv, from, to, n, (Steps){n, n, n}, 0);
    }
}

/* Convolutions of stride 1, activations as [channels, height, width, batch]: a row of pixels, n = width x batch numbers, is
   what the batch is to a linear layer. `index` holds distances from the pixel in hand to those that a tap reads, in x or in
   g, which have zeros around them; `height` rows. A picture's channels and rows are so many numbers apart. */
void powerprop_sparse_conv(const int32_t *ptr, const int32_t *index, const float *v, const float *x, float *y, const float *b,
                           int64_t rows, int64_t n, int64_t height, int64_t x_row, int threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++)
        for (int64_t h = 0, from = share(ptr, rows, t, threads), to = share(ptr, rows, t + 1, threads); h < height; h++)
            forward_rows((Rows){ptr, index, NULL}, v, x + h * x_row, y + h * n, b, from, to, n, (Steps){1, 0, height * n}, 0);
}
void powerprop_sparse_conv_backward(const int32_t *ptr, const int32_t *index, const int32_t *at, const float *v,
                                    const float *x, const float *g, float *dx, float *dv, int64_t rows, int64_t n,
                                    int64_t height, int64_t x_channel, int64_t x_row, int64_t g_row, int threads) {
    Steps by = {1, x_channel, height * n};
    Rows p = {ptr, index, at};
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++)
        for (int64_t h = 0, from = share(ptr, rows, t, threads), to = share(ptr, rows, t + 1, threads); h < height; h++) {
            const float *here = x + h * x_row, *row = g + h * g_row;
            if (dx) backward_rows(p, v, here, row, dx + h * n, dv, from, to, n, by, h > 0);
            else gradient_rows(p, here, row, dv, from, to, n, by, h > 0);
        }
}

/* Check rows of indices (pointers from 0 to count, never falling; indices inside, rising within a row) and transpose them.
   0, or 1 for a pointer and 2 for an index that cannot be. */
int powerprop_sparse_transpose(const int32_t *ptr, const int32_t *index, int64_t rows, int64_t columns, int64_t count,
                               int32_t *turned_ptr, int32_t *turned_index, int32_t *at) {
    if (ptr[0] != 0 || ptr[rows] != count) return 1;
    for (int64_t i = 0; i < rows; i++)
        if (ptr[i] > ptr[i + 1] || ptr[i + 1] > count) return 1;
    memset(turned_ptr, 0, (size_t)(columns + 1) * sizeof *turned_ptr);
    for (int64_t i = 0; i < rows; i++)
        for (int32_t k = ptr[i]; k < ptr[i + 1]; k++) {
            if (index[k] < 0 || index[k] >= columns || (k > ptr[i] && index[k] <= index[k - 1])) return 2;
            turned_ptr[index[k] + 1]++;
        }
    for (int64_t j = 0; j < columns; j++) turned_ptr[j + 1] += turned_ptr[j];
    for (int64_t i = 0; i < rows; i++) /* pointers run ahead by one row, and are put back */
        for (int32_t k = ptr[i]; k < ptr[i + 1]; k++) {
            int32_t to = turned_ptr[index[k]]++;
            turned_index[to] = (int32_t)i, at[to] = k;
        }
    memmove(turned_ptr + 1, turned_ptr, (size_t)columns * sizeof *turned_ptr);
    turned_ptr[0] = 0;
    return 0;
}

/* Where |x| is at least a threshold, which no NaN is; `out` has room for n. Returns how many places it found. */
CLONES int64_t powerprop_sparse_above(const float *x, int64_t n, float threshold, int32_t *out) {
    int64_t found = 0, i = 0;
    for (; i < n; i += LANES) {
        int64_t end = i + LANES < n ? i + LANES : n;
        if (end - i == LANES) {
            Bits above = (Bits)((Lanes)((Bits)load(x + i) & INT32_MAX) >= threshold);
            int32_t any = 0;
            for (int l = 0; l < LANES; l++) any |= above[l];
            if (!any) continue;
        }
        for (int64_t j = i; j < end; j++) out[found] = (int32_t)j, found += (x[j] < 0 ? -x[j] : x[j]) >= threshold;
    }
    return found;
}

/* Memory that was let go and that the C library holds back goes to the system. */
void powerprop_trim(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
