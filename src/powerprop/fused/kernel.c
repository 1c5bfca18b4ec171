/* The step in one pass over memory: base optimiser, virtual target, slope, masks and effective weight.

   Every result is a fixed sequence of IEEE operations (fused multiply-adds where they are written and nowhere else, no
   approximate instructions), so that it does not depend on the compiler, the vector width or the number of threads.
   `items.py` fills the tables. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024 /* numbers that stay in the first cache while the loops below follow each other */
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__ /* the arrays of a loop never overlap */
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (int64_t i = 0; i < n; i++)
#else
#define EACH _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++)
#endif

enum { MOVED, SGD, ADAM };                                /* MOVED: the base optimiser has written its target */
enum { NESTEROV = 1, MAXIMIZE = 2, DECOUPLED = 4 };
enum { NOTHING, HALF, OTHER };                            /* the fraction of an exponent */
enum { PLAIN, MASKED, LINEAR, POWER };                    /* no mask; a mask alone; α = 1 with a master; α > 1 */

typedef struct {
    int64_t kind, flags;
    double lr, decay, momentum, keep, beta1, beta2, eps; /* keep = 1 - dampening */
} Group;

typedef struct {
    int64_t whole, rest;           /* α - 1 = whole + a fraction, which is nothing, a half or another */
    double alpha, floor;
    float mantissa[8];             /* m^fraction in powers of m - 1, for m from √½ to √2 */
    float exponent[8];             /* 2^r in powers of r, for r from -½ to ½ */
    float high, low;               /* the fraction in two parts: a whole number times the first is exact */
} Power;

typedef struct {
    float *weight, *phi, *factor;  /* factor may be absent: products and square roots are computed again */
    const float *grad;
    float *first, *second, *step;  /* momentum or mean, mean square, number of steps */
    const uint8_t *active, *trainable;
    int64_t size, group, power, kind, fresh; /* fresh: the momentum begins with this gradient */
    double decay_active, decay_rest;         /* of θ, past the base optimiser */
    double shrink;                           /* what is left of φ after its own decay */
    float rate, root;                        /* Adam's rate and 1/√(1 - β₂^t), worked out here once a step */
} Item;

/* --- |φ|^(α-1) --------------------------------------------------------------------------------------------------- */

INLINE float whole_power(float x, int64_t n) {
    if (n == 0) return 1.0f;
    if (n == 1) return fabsf(x);
    float y = n % 2 ? fabsf(x * x * x) : x * x;
    if (n == 4) return y * y;
    for (int64_t i = 1; i < n / 2; i++) y = y * x * x;
    return y;
}

/* Σ cᵢxⁱ, written out: compilers do not unroll what they take for calls, nor vectorise around it */
INLINE float polynomial(const float *c, float x) {
    float y = fmaf(c[7], x, c[6]);
    y = fmaf(y, x, c[5]);
    y = fmaf(y, x, c[4]);
    y = fmaf(y, x, c[3]);
    y = fmaf(y, x, c[2]);
    y = fmaf(y, x, c[1]);
    return fmaf(y, x, c[0]);
}

/* |x| = 2^k·m with m from √½ to √2, and fraction·k = q + r with whole q, so that |x|^fraction = 2^q·2^r·m^fraction */
INLINE float broken_power(const Power *p, float x) {
    union { float f; int32_t i; } bits = {.f = fabsf(x)}, mantissa, scale;
    int32_t k = (bits.i - 0x3f3504f3) >> 23;
    mantissa.i = bits.i - k * (1 << 23);
    float product = p->high * (float)k, q = rintf(product), r = fmaf(p->low, (float)k, product - q);
    scale.f = polynomial(p->exponent, r);
    scale.i += (int32_t)q * (1 << 23);
    float y = polynomial(p->mantissa, mantissa.f - 1.0f) * scale.f;
    return bits.i == 0 ? 0.0f : y;
}

INLINE void whole_powers(const float *restrict phi, float *restrict out, int64_t n, int64_t exponent) {
    EACH out[i] = whole_power(phi[i], exponent);
}

static void powers(const Power *p, const float *restrict phi, float *restrict out, int64_t n) {
    float whole[BLOCK], *restrict product = p->rest == NOTHING ? out : whole;
    switch (p->whole) { /* constants, so that the loops have no branches */
        case 0: break;
        case 1: whole_powers(phi, product, n, 1); break;
        case 2: whole_powers(phi, product, n, 2); break;
        case 3: whole_powers(phi, product, n, 3); break;
        case 4: whole_powers(phi, product, n, 4); break;
        default: whole_powers(phi, product, n, p->whole);
    }
    if (p->rest == NOTHING) return;
    if (p->rest == HALF)
        EACH out[i] = sqrtf(fabsf(phi[i]));
    else
        EACH out[i] = broken_power(p, phi[i]);
    if (p->whole)
        EACH out[i] *= whole[i];
}

/* --- the base optimisers' moves ---------------------------------------------------------------------------------- */

INLINE void sgd(const Group *g, const Item *it, int64_t at, float *restrict move, int64_t n, int momentum) {
    const float *restrict grad = it->grad + at, *restrict weight = it->weight + at;
    float *restrict buffer = momentum ? it->first + at : NULL;
    float sign = g->flags & MAXIMIZE ? -1.0f : 1.0f, rate = (float)-g->lr, decay = (float)g->decay;
    float mass = (float)g->momentum, keep = (float)g->keep;
    int nesterov = (g->flags & NESTEROV) != 0;
    if (!momentum && !decay) {
        rate *= sign;
        EACH move[i] = rate * grad[i];
        return;
    }
    EACH {
        float push = sign * grad[i] + decay * weight[i];
        if (momentum) {
            float speed = it->fresh ? push : mass * buffer[i] + keep * push;
            buffer[i] = speed;
            push = nesterov ? push + mass * speed : speed;
        }
        move[i] = rate * push;
    }
}

INLINE void adam(const Group *g, const Item *it, int64_t at, float *restrict move, int64_t n) {
    const float *restrict grad = it->grad + at, *restrict weight = it->weight + at;
    float *restrict mean = it->first + at, *restrict square = it->second + at;
    float sign = g->flags & MAXIMIZE ? -1.0f : 1.0f, eps = (float)g->eps, rate = it->rate, root = it->root;
    float coupled = g->flags & DECOUPLED ? 0.0f : (float)g->decay;
    float decoupled = g->flags & DECOUPLED ? (float)(-g->lr * g->decay) : 0.0f;
    float new1 = (float)(1 - g->beta1), old2 = (float)g->beta2, new2 = (float)(1 - g->beta2);
    EACH {
        float push = sign * grad[i] + coupled * weight[i];
        float m = mean[i] + (push - mean[i]) * new1;
        float v = old2 * square[i] + new2 * (push * push);
        mean[i] = m;
        square[i] = v;
        move[i] = rate * (m / (sqrtf(v) * root + eps)) + decoupled * weight[i];
    }
}

static void base_move(const Group *g, const Item *it, int64_t at, float *move, int64_t n) {
    if (g->kind == MOVED) memset(move, 0, (size_t)n * sizeof *move);
    else if (g->kind == ADAM) adam(g, it, at, move, n);
    else if (g->momentum != 0) sgd(g, it, at, move, n, 1);
    else sgd(g, it, at, move, n, 0);
}

/* --- what becomes of them ---------------------------------------------------------------------------------------- */

typedef struct {
    float *restrict weight, *restrict phi;
    const float *restrict move;
    const int32_t *restrict active, *restrict trainable; /* all bits set where the mask is */
    float alpha, floor, rest, more, shrink;              /* a decay of `rest`·θ, and `more` where it is active */
} View;

/* x where the mask is, else zero, whatever x is; by bits, because compilers turn repeated questions into jumps */
INLINE float kept(float x, int32_t mask) {
    union { float f; int32_t i; } bits = {.f = x};
    bits.i &= mask;
    return bits.f;
}

INLINE float either(float x, float other, int32_t mask) {
    union { float f; int32_t i; } a = {.f = x}, b = {.f = other};
    a.i = (a.i & mask) | (b.i & ~mask);
    return a.f;
}

INLINE float decayed(View v, float theta, int32_t shown) { return v.rest * theta + v.more * kept(theta, shown); }

/* θ takes the target where it is active and trained, and the move alone where it is trained but hidden */
INLINE void linear(View v, int64_t n) {
    EACH {
        int32_t shown = v.active ? v.active[i] : -1;
        float old = v.phi[i], next = v.weight[i] + v.move[i];
        if (v.active) next = next + kept(old, ~shown) - decayed(v, old, shown);
        if (v.trainable) next = either(next, old, v.trainable[i]);
        v.phi[i] = next;
        v.weight[i] = kept(next, shown);
    }
}

/* φ + α|φ|^(α-1)·(target - w), shrunk, nothing where it is not trained, and zero where the weight would underflow */
INLINE float moved(View v, int64_t i, float factor) {
    int32_t shown = v.active ? v.active[i] : -1;
    float old = v.phi[i], theta = old * factor;
    float move = v.move[i] + (v.weight[i] - kept(theta, shown));
    if (v.active) move -= decayed(v, theta, shown);
    float next = v.shrink * (old + v.alpha * (factor * move));
    if (v.trainable) next = either(next, old, v.trainable[i]);
    return fabsf(next) <= v.floor ? 0.0f : next;
}

INLINE void whole(View v, int64_t n, int64_t exponent) {
    EACH {
        float next = moved(v, i, whole_power(v.phi[i], exponent));
        v.phi[i] = next;
        next *= whole_power(next, exponent);
        v.weight[i] = v.active ? kept(next, v.active[i]) : next;
    }
}

INLINE void broken(View v, const Power *p, int64_t n, float *restrict factor) {
    EACH v.phi[i] = moved(v, i, factor[i]);
    powers(p, v.phi, factor, n);
    EACH {
        float next = v.phi[i] * factor[i];
        v.weight[i] = v.active ? kept(next, v.active[i]) : next;
    }
}

INLINE void power(View v, const Item *it, const Power *p, int64_t at, int64_t n) {
    float scratch[BLOCK], *factor = it->factor ? it->factor + at : scratch;
    switch (p->rest == NOTHING ? p->whole : 0) {
        case 1: whole(v, n, 1); return;
        case 2: whole(v, n, 2); return;
        case 3: whole(v, n, 3); return;
        case 4: whole(v, n, 4); return;
        default:
            if (!it->factor) powers(p, v.phi, factor, n);
            broken(v, p, n, factor);
    }
}

static void plain(View v, int64_t n) {
    EACH v.weight[i] += v.move[i];
}

static void only_masked(View v, int64_t n) {
    EACH v.weight[i] = kept(v.weight[i] + v.move[i], v.active[i]);
}

/* A constant NULL lets the compiler leave the mask out of the loops. */
static void absorb(View v, const Item *it, const Power *p, int64_t at, int64_t n) {
    View dense = v, used = v, trained = v;
    dense.active = trained.active = dense.trainable = used.trainable = NULL;
    int masks = (v.active != NULL) + 2 * (v.trainable != NULL);
    if (it->kind == PLAIN) plain(v, n);
    else if (it->kind == MASKED) only_masked(v, n);
    else if (it->kind == LINEAR && masks == 1) linear(used, n);
    else if (it->kind == LINEAR && masks == 2) linear(trained, n);
    else if (it->kind == LINEAR) linear(v, n);
    else if (masks == 0) power(dense, it, p, at, n);
    else if (masks == 1) power(used, it, p, at, n);
    else if (masks == 2) power(trained, it, p, at, n);
    else power(v, it, p, at, n);
}

static const int32_t *widened(const uint8_t *mask, int64_t at, int32_t *restrict out, int64_t n) {
    if (!mask) return NULL;
    EACH out[i] = -(int32_t)mask[at + i];
    return out;
}

static void stretch(const Item *it, const Group *g, const Power *p, int64_t from, int64_t to) {
    float move[BLOCK];
    int32_t active[BLOCK], trainable[BLOCK];
    for (int64_t at = from; at < to; at += BLOCK) {
        int64_t n = to - at < BLOCK ? to - at : BLOCK;
        base_move(g, it, at, move, n);
        const int32_t *used = widened(it->active, at, active, n);
        const int32_t *trained = it->trainable == it->active ? used : widened(it->trainable, at, trainable, n);
        View v = {it->weight + at, it->phi ? it->phi + at : NULL, move, used, trained, (float)p->alpha, (float)p->floor,
                  (float)it->decay_rest, (float)(it->decay_active - it->decay_rest), (float)it->shrink};
        absorb(v, it, p, at, n);
    }
}

/* --- called from Python ------------------------------------------------------------------------------------------ */

/* places: pairs of an item's number and where its stretch begins; a stretch has at most `length` numbers */
void powerprop_step(Item *items, int64_t count, const Group *groups, const Power *p, const int64_t *places,
                    int64_t stretches, int64_t length, int threads) {
    for (int64_t i = 0; i < count; i++) {
        const Group *g = groups + items[i].group;
        if (g->kind != ADAM) continue;
        double t = *items[i].step += 1.0f;
        items[i].rate = (float)(-g->lr / (1 - pow(g->beta1, t)));
        items[i].root = (float)(1 / sqrt(1 - pow(g->beta2, t)));
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < stretches; s++) {
        const Item *it = items + places[2 * s];
        int64_t from = places[2 * s + 1], to = from + length < it->size ? from + length : it->size;
        stretch(it, groups + it->group, p + it->power, from, to);
    }
}

void powerprop_powers(const Power *p, const float *phi, float *out, int64_t n) {
    for (int64_t at = 0; at < n; at += BLOCK) powers(p, phi + at, out + at, n - at < BLOCK ? n - at : BLOCK);
}

/* the numbers where the mask is, else zero */
void powerprop_masked(const float *restrict x, const uint8_t *restrict mask, float *restrict out, int64_t n) {
    EACH out[i] = kept(x[i], -(int32_t)mask[i]);
}

/* --- the k-th smallest number, for masks ------------------------------------------------------------------------- */

#define BINS 2048 /* 11 + 11 + 10 bits in three passes */

/* unsigned numbers in the order of the floats, NaN last as in numpy */
INLINE uint32_t ordered(float x) {
    union { float f; uint32_t u; } bits = {.f = x};
    uint32_t key = bits.u & 0x80000000u ? ~bits.u : bits.u | 0x80000000u;
    return x != x ? 0xffffffffu : key;
}

float powerprop_kth(const float *x, int64_t n, int64_t k) {
    static const int shifts[3] = {21, 10, 0}, bins[3] = {BINS, BINS, BINS / 2};
    uint32_t prefix = 0, known = 0;
    for (int pass = 0; pass < 3; pass++) {
        int64_t counts[4][BINS];  /* four, or equal numbers in a row would wait for each other */
        memset(counts, 0, sizeof counts);
        uint32_t last = (uint32_t)bins[pass] - 1;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = ordered(x[i]);
            if ((key & known) == prefix) counts[i & 3][key >> shifts[pass] & last]++;
        }
        uint32_t bin = 0;
        for (;; bin++) {
            int64_t here = counts[0][bin] + counts[1][bin] + counts[2][bin] + counts[3][bin];
            if (k < here) break;
            k -= here;
        }
        prefix |= bin << shifts[pass];
        known |= last << shifts[pass];
    }
    union { float f; uint32_t u; } bits = {.u = prefix & 0x80000000u ? prefix & 0x7fffffffu : ~prefix};
    return bits.f;
}
