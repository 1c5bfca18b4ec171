/* A network in one call: a list of steps over buffers that were planned before, with the weights of `conv.c`'s form.

   A call's batch is taken in groups of N inputs, each as [channels, height, width, N] in an arena of floats; threads take
   groups, or share every step where there are too few. No step allocates. Numbers do not depend on the threads.
   `export/program.py` writes the steps and checks inputs, sizes and weights. */

#include "lanes.h"
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { ENTER, LEAVE, PRODUCT, DOT, POOL, POINTWISE, ADD, NORM, AFFINE, BORDER, PHASE, ATTENTION };

/* Distances in floats. A view: `data` in the arena is its first number that is no border, `channel` and `row` its distances. */
typedef struct { int64_t data, channel, row; } View;
typedef struct {
    int64_t op, kind; /* what it is, and which of its forms */
    View x, y, add;
    int64_t channels, height, width; /* of the output */
    int64_t from, to;                /* its rows that this step makes */
    int64_t lanes;                   /* of a run, for products */
    int64_t ptr, at, v, bias;        /* in the weights, in bytes; -1: none */
    int64_t blocks;
    int64_t a[8]; /* what else the step needs */
} Step;
typedef struct {
    const char *weights;
    float *arena;
    const float *const *inputs;
    float *const *outputs;
    int64_t N, batch, first, t, T; /* the group begins at this input; share t of T */
} Call;

INLINE Plane plane(const Call *c, View v) { return (Plane){v.data < 0 ? 0 : c->arena + v.data, v.channel, v.row}; }

/* --- functions of a number ---------------------------------------------------------------------------------------- */

enum { RELU = 1, GELU, GELU_TANH, SILU, HARDSWISH, SIGMOID, TANH, RELU6 };

/* 2^(x log2 e) by a polynomial of 2^r, |r| <= 1/2; NaN stays */
INLINE float exponential(float x) {
    float low = x < -87.0f ? -87.0f : x, high = low > 88.0f ? 88.0f : low; /* NaN fails both */
    float z = high * 1.44269504f, shifted = z + 0x1.8p23f, q = shifted - 0x1.8p23f;
    float r = high - q * 0.693145752f;
    r -= q * 1.42860677e-6f;
    float y = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666657f + r * (0.0416664876f + r * (0.00833336077f + r * 0.00139304355f)))));
    union { float f; int32_t i; } two = {shifted};
    two.i = (int32_t)(((uint32_t)two.i << 23) + 0x3f800000u);
    return y * two.f;
}
/* 1 - t·exp(-x² + p(t)), t = 1 / (1 + |x|/2): Chebyshev's fit, 1.2e-7 at most (Numerical Recipes, 6.2) */
INLINE float error_function(float x) {
    float a = fabsf(x), t = 1.0f / (1.0f + 0.5f * a);
    float p = -1.26551223f + t * (1.00002368f + t * (0.37409196f + t * (0.09678418f + t * (-0.18628806f + t * (0.27886807f
        + t * (-1.13520398f + t * (1.48851587f + t * (-0.82215223f + t * 0.17087277f))))))));
    float tail = t * exponential(-a * a + p);
    return copysignf(1.0f - tail, x);
}
/* An odd polynomial near 0, where the difference from 1 would lose its digits */
INLINE float hyperbolic_tangent(float x) {
    float z = x * x, far = 1.0f - 2.0f / (1.0f + exponential(2.0f * fabsf(x)));
    float near = x + x * z * (-0.333332819f + z * (0.133314422f + z * (-0.0537397156f + z * (0.0206390888f - z * 0.00570498873f))));
    return fabsf(x) < 0.625f ? near : copysignf(far, x);
}
INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE float clipped(float x, float high) { float y = x < 0 ? 0 : x; return y > high ? high : y; }
INLINE float apply(int64_t kind, float x) {
    switch (kind) {
    case RELU: return x < 0 ? 0 : x;
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.707106781f));
    case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    case SILU: return x * sigmoid(x);
    case HARDSWISH: return x * clipped(x + 3.0f, 6.0f) / 6.0f;
    case SIGMOID: return sigmoid(x);
    case TANH: return hyperbolic_tangent(x);
    case RELU6: return clipped(x, 6.0f);
    default: return x;
    }
}
#define EVERY(K) case K: for (int64_t i = 0; i < n; i++) y[i] = apply(K, x[i]); break;
CLONES static void pointwise(int64_t kind, const float *x, float *restrict y, int64_t n) {
    switch (kind) { EVERY(RELU) EVERY(GELU) EVERY(GELU_TANH) EVERY(SILU) EVERY(HARDSWISH) EVERY(SIGMOID) EVERY(TANH) EVERY(RELU6) }
}
CLONES static void sum(const float *x, const float *z, float *restrict y, int64_t n, int relu) {
    if (relu) for (int64_t i = 0; i < n; i++) { float s = x[i] + z[i]; y[i] = s < 0 ? 0 : s; }
    else for (int64_t i = 0; i < n; i++) y[i] = x[i] + z[i];
}
CLONES static void scaled(const float *x, float *restrict y, int64_t n, float a, float b) {
    for (int64_t i = 0; i < n; i++) y[i] = a * x[i] + b;
}

/* --- in and out ----------------------------------------------------------------------------------------------------- */

typedef float Eight __attribute__((vector_size(32), aligned(4)));
typedef int32_t Places __attribute__((vector_size(32)));
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif
#define LOW(a, b) PICK(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) PICK(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW2(a, b) PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(a, b) PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW4(a, b) PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH4(a, b) PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

INLINE void turn8(const float *x, int64_t x_row, float *y, int64_t y_row) {
    Eight r[8], s[8];
    for (int i = 0; i < 8; i++) memcpy(&r[i], x + i * x_row, sizeof r[i]);
    for (int i = 0; i < 4; i++) s[2 * i] = LOW(r[2 * i], r[2 * i + 1]), s[2 * i + 1] = HIGH(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++)
            r[i + 2 * j] = LOW2(s[i + j], s[i + j + 2]), r[i + 2 * j + 1] = HIGH2(s[i + j], s[i + j + 2]);
    for (int i = 0; i < 4; i++) s[i] = LOW4(r[i], r[i + 4]), s[i + 4] = HIGH4(r[i], r[i + 4]);
    for (int i = 0; i < 8; i++) memcpy(y + i * y_row, &s[i], sizeof s[i]);
}
/* y[j][i] = x[i][j] for n rows of m */
CLONES static void transpose(const float *x, int64_t x_row, float *y, int64_t y_row, int64_t n, int64_t m) {
    int64_t whole = n / 8 * 8, wide = m / 8 * 8;
    for (int64_t top = 0; top < whole; top += 64) /* in squares, so that lines are read and written as wholes */
        for (int64_t j = 0; j < wide; j += 8)
            for (int64_t i = top; i < whole && i < top + 64; i += 8) turn8(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i < whole ? wide : 0; j < m; j++) y[j * y_row + i] = x[i * x_row + j];
}

/* Inputs of the call as lanes: channels, height, width of each. Lanes without an input are zero. */
static void enter(const Step *s, const Call *c) {
    int64_t size = s->channels * s->height * s->width, here = c->batch - c->first < c->N ? c->batch - c->first : c->N;
    const float *x = c->inputs[s->a[0]] + c->first * size;
    Plane y = plane(c, s->y);
    int64_t rows = s->channels * s->height;
    if (s->height == 1 && s->width == 1 && y.channel == c->N && c->T == 1) {
        transpose(x, size, y.data, c->N, here, size);
        if (here < c->N)
            for (int64_t i = 0; i < size; i++) memset(y.data + i * c->N + here, 0, (size_t)(c->N - here) * sizeof(float));
        return;
    }
    for (int64_t i = part(rows, c->t, c->T); i < part(rows, c->t + 1, c->T); i++) {
        float *to = y.data + i / s->height * y.channel + i % s->height * y.row;
        const float *from = x + i * s->width;
        if (c->N == 1) memcpy(to, from, (size_t)s->width * sizeof(float));
        else {
            if (here < c->N) memset(to, 0, (size_t)(s->width * c->N) * sizeof(float));
            transpose(from, size, to, c->N, here, s->width);
        }
    }
}
static void leave(const Step *s, const Call *c) {
    int64_t size = s->channels * s->height * s->width, here = c->batch - c->first < c->N ? c->batch - c->first : c->N;
    float *y = c->outputs[s->a[0]] + c->first * size;
    Plane x = plane(c, s->x);
    int64_t rows = s->channels * s->height, from = part(rows, c->t, c->T), to = part(rows, c->t + 1, c->T);
    if (s->height == 1 && s->width == 1) {
        if (c->N == 1) for (int64_t i = from; i < to; i++) y[i] = x.data[i * x.channel];
        else transpose(x.data + from * x.channel, x.channel, y + from, size, to - from, here);
        return;
    }
    for (int64_t i = from; i < to; i++) {
        const float *in = x.data + i / s->height * x.channel + i % s->height * x.row;
        if (c->N == 1) memcpy(y + i * s->width, in, (size_t)s->width * sizeof(float));
        else transpose(in, c->N, y + i * s->width, size, s->width, here);
    }
}

/* --- steps ---------------------------------------------------------------------------------------------------------- */

INLINE const void *at(const Call *c, int64_t place) { return place < 0 ? 0 : c->weights + place; }

static void products(const Step *s, const Call *c) {
    Weights w = {at(c, s->ptr), at(c, s->at), at(c, s->v), at(c, s->bias), s->channels, s->blocks};
    product(w, plane(c, s->x), plane(c, s->y), plane(c, s->add), s->from, s->to, s->lanes, s->kind == RELU, c->t, c->T);
}

/* One input: the sum over each row's weights, in eight parts of a fixed order, places in 16 bits */
CLONES static void dot(const Step *s, const Call *c) {
    const int32_t *ptr = at(c, s->ptr);
    const uint16_t *index = at(c, s->at);
    const float *v = at(c, s->v), *bias = at(c, s->bias), *x = c->arena + s->x.data;
    Plane add = plane(c, s->add);
    float *y = c->arena + s->y.data;
    for (int64_t o = part(s->channels, c->t, c->T); o < part(s->channels, c->t + 1, c->T); o++) {
        float p[8] = {0};
        int32_t k = ptr[o], end = ptr[o + 1];
        for (; k + 8 <= end; k += 8)
            for (int i = 0; i < 8; i++) p[i] += v[k + i] * x[index[k + i]];
        for (int i = 0; k < end; k++, i++) p[i] += v[k] * x[index[k]];
        float sum = ((p[0] + p[4]) + (p[1] + p[5])) + ((p[2] + p[6]) + (p[3] + p[7])) + (bias ? bias[o] : 0.0f);
        if (add.data) sum += add.data[o];
        y[o] = s->kind == RELU && sum < 0 ? 0 : sum;
    }
}

/* Maximum or mean of windows; a: kernel, stride, padding (height, width each), whether padding counts, height of x, width of x */
enum { MOST, MEAN, WIDEST = 2048 };
INLINE float more(int kind, float a, float b) { return kind == MEAN ? a + b : (b > a || b != b) ? b : a; }
INLINE void pooled_row(const Step *s, const float *x, int64_t x_row, float *restrict y, int64_t h, const int64_t n, int64_t high,
                       int64_t wide, const int64_t step, const int kind) {
    int64_t h0 = h * s->a[2] - s->a[4], w0 = -s->a[5], W = s->width;
    int64_t first = h0 < 0 ? -h0 : 0, end = high - h0 < s->a[0] ? high - h0 : s->a[0];
    float column[WIDEST];
    const float *rows = x + h0 * x_row;
    if (n == 1 && wide <= WIDEST) { /* the columns first, whose numbers lie side by side */
        for (int64_t w = 0; w < wide; w++) column[w] = kind == MOST ? -INFINITY : 0;
        for (int64_t i = first; i < end; i++)
            for (int64_t w = 0; w < wide; w++) column[w] = more(kind, column[w], rows[i * x_row + w]);
        rows = column, first = 0, end = 1;
    }
    for (int64_t i = 0; i < W * n; i++) y[i] = kind == MOST ? -INFINITY : 0;
    for (int64_t i = first; i < end; i++)
        for (int64_t j = 0; j < s->a[1]; j++) {
            const float *in = rows + i * x_row + (w0 + j) * n;
            int64_t from = w0 + j < 0 ? (-(w0 + j) + step - 1) / step : 0, to = (wide - w0 - j + step - 1) / step;
            to = to < W ? to : W;
            for (int64_t w = from; w < to; w++)
                for (int64_t l = 0; l < n; l++) y[w * n + l] = more(kind, y[w * n + l], in[w * step * n + l]);
        }
    if (kind == MEAN)
        for (int64_t w = 0; w < W; w++) {
            int64_t top = h0 < 0 ? 0 : h0, under = h0 + s->a[0] < high ? h0 + s->a[0] : high, l0 = w0 + w * step;
            int64_t left = l0 < 0 ? 0 : l0, right = l0 + s->a[1] < wide ? l0 + s->a[1] : wide;
            int64_t padded = (h0 + s->a[0] < high + s->a[4] ? s->a[0] : high + s->a[4] - h0)
                * (l0 + s->a[1] < wide + s->a[5] ? s->a[1] : wide + s->a[5] - l0);
            float share = 1.0f / (float)(s->a[6] ? padded : (under - top) * (right - left));
            for (int64_t l = 0; l < n; l++) y[w * n + l] *= share;
        }
}

/* The maximum of 2 x 2 pixels of one image, the usual one: eight at a time */
INLINE Eight most8(Eight a, Eight b) {
    Places take = (Places)(b > a) | (Places)(b != b);
    return (Eight)(((Places)b & take) | ((Places)a & ~take));
}
INLINE void halved_row(const float *a, const float *b, float *restrict y, int64_t W) {
    int64_t w = 0;
    for (; w + 8 <= W; w += 8) {
        Eight r[4];
        memcpy(r, a + 2 * w, sizeof *r), memcpy(r + 1, a + 2 * w + 8, sizeof *r);
        memcpy(r + 2, b + 2 * w, sizeof *r), memcpy(r + 3, b + 2 * w + 8, sizeof *r);
        r[0] = most8(r[0], r[2]), r[1] = most8(r[1], r[3]);
        r[2] = PICK(r[0], r[1], 0, 2, 4, 6, 8, 10, 12, 14), r[3] = PICK(r[0], r[1], 1, 3, 5, 7, 9, 11, 13, 15);
        r[0] = most8(r[2], r[3]);
        memcpy(y + w, r, sizeof *r);
    }
    for (; w < W; w++) y[w] = more(MOST, more(MOST, a[2 * w], a[2 * w + 1]), more(MOST, b[2 * w], b[2 * w + 1]));
}
CLONES static void halve(const Step *s, const Call *c) {
    Plane x = plane(c, s->x), y = plane(c, s->y);
    for (int64_t o = part(s->channels, c->t, c->T); o < part(s->channels, c->t + 1, c->T); o++)
        for (int64_t h = s->from; h < s->to; h++) {
            const float *in = x.data + o * x.channel + 2 * h * x.row;
            halved_row(in, in + x.row, y.data + o * y.channel + h * y.row, s->width);
        }
}
CLONES static void pool(const Step *s, const Call *c) {
    static const int64_t two[] = {2, 2, 2, 2, 0, 0};
    if (s->kind == MOST && !memcmp(s->a, two, sizeof two) && c->N == 1) {
        halve(s, c);
        return;
    }
    Plane x = plane(c, s->x), y = plane(c, s->y);
    int64_t high = s->a[7] >> 32, wide = s->a[7] & 0xffffffff, rows = s->to - s->from, all = s->channels * rows;
    for (int64_t i = part(all, c->t, c->T); i < part(all, c->t + 1, c->T); i++) {
        int64_t h = s->from + i % rows;
        const float *in = x.data + i / rows * x.channel;
        float *out = y.data + i / rows * y.channel + h * y.row;
#define POOLED(n, step, kind) pooled_row(s, in, x.row, out, h, n, high, wide, step, kind)
        if (s->kind == MOST) {
            if (c->N == LANES) POOLED(LANES, s->a[3], MOST);
            else if (c->N == 1 && s->a[3] == 2) POOLED(1, 2, MOST);
            else if (c->N == 1 && s->a[3] == 1) POOLED(1, 1, MOST);
            else POOLED(c->N, s->a[3], MOST);
        } else if (c->N == LANES) POOLED(LANES, s->a[3], MEAN);
        else POOLED(c->N, s->a[3], MEAN);
    }
}

/* Steps over rows of numbers: functions of each, sums of two, a·x + b of a channel */
static void rows_of_numbers(const Step *s, const Call *c) {
    Plane x = plane(c, s->x), y = plane(c, s->y), z = plane(c, s->add);
    int64_t rows = s->to - s->from, all = s->channels * rows, n = s->width * c->N;
    const float *a = at(c, s->v), *b = at(c, s->bias);
    for (int64_t i = part(all, c->t, c->T); i < part(all, c->t + 1, c->T); i++) {
        int64_t o = i / rows, h = s->from + i % rows;
        const float *in = x.data + o * x.channel + h * x.row;
        float *out = y.data + o * y.channel + h * y.row;
        if (s->op == POINTWISE && s->kind) pointwise(s->kind, in, out, n);
        else if (s->op == POINTWISE) memcpy(out, in, (size_t)n * sizeof(float));
        else if (s->op == ADD) sum(in, z.data + o * z.channel + h * z.row, out, n, s->kind == RELU);
        else scaled(in, out, n, a[o], b[o]);
    }
}

/* Over the channels of each lane: (x - mean) / sqrt(var + eps) · a + b; eps in a[0], by its bits */
INLINE void norm_lanes(const Step *s, const Call *c, Plane x, Plane y, int64_t l, const int64_t n) {
    const float *a = at(c, s->v), *b = at(c, s->bias);
    float mean[LANES] = {0}, var[LANES] = {0}, eps, count = (float)s->channels;
    int32_t bits = (int32_t)s->a[0];
    memcpy(&eps, &bits, sizeof eps);
    for (int64_t o = 0; o < s->channels; o++)
        for (int64_t i = 0; i < n; i++) mean[i] += x.data[o * x.channel + l + i];
    for (int64_t i = 0; i < n; i++) mean[i] /= count;
    for (int64_t o = 0; o < s->channels; o++)
        for (int64_t i = 0; i < n; i++) {
            float d = x.data[o * x.channel + l + i] - mean[i];
            var[i] += d * d;
        }
    for (int64_t i = 0; i < n; i++) var[i] = 1.0f / sqrtf(var[i] / count + eps);
    for (int64_t o = 0; o < s->channels; o++)
        for (int64_t i = 0; i < n; i++)
            y.data[o * y.channel + l + i] = (x.data[o * x.channel + l + i] - mean[i]) * var[i] * a[o] + b[o];
}
CLONES static void norm(const Step *s, const Call *c) {
    Plane x = plane(c, s->x), y = plane(c, s->y);
    if (c->N < LANES) {
        if (c->t == 0) for (int64_t l = 0; l < c->N; l++) norm_lanes(s, c, x, y, l, 1);
        return;
    }
    int64_t all = c->N / LANES;
    for (int64_t i = part(all, c->t, c->T); i < part(all, c->t + 1, c->T); i++)
        norm_lanes(s, c, x, y, i * LANES, LANES);
}

/* Zeros around every channel: a[0] rows above and below, a[1] numbers left and right, a[2] rows of a[3] numbers in all */
static void border(const Step *s, const Call *c) {
    Plane y = plane(c, s->y);
    int64_t above = s->a[0], beside = s->a[1];
    for (int64_t o = part(s->channels, c->t, c->T); o < part(s->channels, c->t + 1, c->T); o++) {
        float *p = y.data + o * y.channel - above * y.row - beside;
        size_t outside = (size_t)(above * y.row + beside) * sizeof(float);
        memset(p, 0, outside);
        for (int64_t h = 0; beside && h + 1 < s->height; h++)
            memset(p + (above + h + 1) * y.row - beside, 0, (size_t)(2 * beside) * sizeof(float));
        memset(p + (above + s->height) * y.row - beside, 0, outside);
    }
}

/* Every a[0]-th row and a[1]-th pixel from (a[2], a[3]) of x: what one tap of a strided convolution sees. a[4], a[5]: the
   height and width of x, a[6]: phases of a channel in y. Pixels beyond x are zero. */
INLINE void phase_row(const float *x, float *y, int64_t from, int64_t to, int64_t step, const int64_t n) {
    for (int64_t w = from; w < to; w++)
        for (int64_t l = 0; l < n; l++) y[w * n + l] = x[w * step * n + l];
}
CLONES static void phase(const Step *s, const Call *c) {
    Plane x = plane(c, s->x), y = plane(c, s->y);
    int64_t n = c->N, step = s->a[1], at = s->a[3], first = at < 0 ? (-at + step - 1) / step : 0;
    int64_t end = at < s->a[5] ? (s->a[5] - at + step - 1) / step : 0;
    first = first < s->width ? first : s->width, end = end < first ? first : end < s->width ? end : s->width;
    for (int64_t i = part(s->channels, c->t, c->T) * s->height; i < part(s->channels, c->t + 1, c->T) * s->height; i++) {
        int64_t o = i / s->height, h = i % s->height, from = h * s->a[0] + s->a[2];
        float *out = y.data + o * s->a[6] * y.channel + h * y.row;
        const float *in = x.data + o * x.channel + from * x.row + at * n;
        if (from < 0 || from >= s->a[4]) { memset(out, 0, (size_t)(s->width * n) * sizeof(float)); continue; }
        memset(out, 0, (size_t)(first * n) * sizeof(float));
        memset(out + end * n, 0, (size_t)((s->width - end) * n) * sizeof(float));
        if (n == LANES) phase_row(in, out, first, end, step, LANES);
        else if (n == 1 && step == 2) phase_row(in, out, first, end, 2, 1);
        else phase_row(in, out, first, end, step, n);
    }
}

static void run(const Step *steps, int64_t count, const Call *c) {
    for (const Step *s = steps; s < steps + count; s++) {
        switch (s->op) {
        case ENTER: enter(s, c); break;
        case LEAVE: leave(s, c); break;
        case PRODUCT: products(s, c); break;
        case DOT: dot(s, c); break;
        case POOL: pool(s, c); break;
        case POINTWISE: case ADD: case AFFINE: rows_of_numbers(s, c); break;
        case NORM: norm(s, c); break;
        case BORDER: border(s, c); break;
        case PHASE: phase(s, c); break;
        }
        if (c->T > 1) {
#pragma omp barrier
        }
    }
}

/* The arena has `size` floats for every thread that takes groups of its own. */
void powerprop_infer(const char *steps, int64_t count, const char *weights, float *arena, int64_t size,
                     const float *const *inputs, float *const *outputs, int64_t batch, int64_t N, int threads) {
    int64_t groups = (batch + N - 1) / N;
    int alone = threads == 1 || groups >= threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t t = 0, T = 1;
#ifdef _OPENMP
        t = omp_get_thread_num(), T = omp_get_num_threads();
#endif
        Call c = {weights, arena + (alone ? t * size : 0), inputs, outputs, N, batch, 0, alone ? 0 : t, alone ? 1 : T};
        for (int64_t g = alone ? t : 0; g < groups; g += alone ? T : 1) {
            c.first = g * N;
            run((const Step *)steps, count, &c);
        }
    }
}
