/* The step in one pass over memory: base optimiser, virtual target, slope, masks and effective weight.

   Every result is a fixed sequence of IEEE operations (no contraction, no approximate instructions), so that it does not
   depend on the compiler, the vector width or the number of threads. `plan.py` fills the tables. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024 /* numbers that stay in the first cache while the loops below follow each other */
#define INLINE static inline __attribute__((always_inline))

enum { MOVED, SGD, ADAM };                                /* MOVED: the base optimiser has written its target */
enum { NESTEROV = 1, MAXIMIZE = 2, DECOUPLED = 4 };
enum { PLAIN, MASKED, LINEAR, POWER };                    /* no mask; a mask alone; α = 1 with a master; α > 1 */

typedef struct {
    int64_t kind, flags;
    double lr, decay, momentum, keep, beta1, beta2, eps; /* keep = 1 - dampening */
} Group;

typedef struct {
    int64_t whole, broken;         /* α - 1 = whole + a fraction, if broken */
    double alpha, floor;
    float polynomial[8];           /* m^fraction for m - 1 in [√½ - 1, √2 - 1] */
    float scale[256];              /* 2^(fraction·(i - 127)) */
} Power;

typedef struct {
    float *weight, *phi, *factor;  /* factor may be absent: whole powers are computed again */
    const float *grad;
    float *first, *second, *step;  /* momentum or mean, mean square, number of steps */
    const uint8_t *active, *trainable;
    int64_t size, group, power, kind, fresh; /* fresh: the momentum begins with this gradient */
    double decay_active, decay_rest;         /* of θ, past the base optimiser */
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

INLINE float broken_power(const Power *p, float x) {
    union { float f; uint32_t u; int32_t i; } bits = {.f = fabsf(x)}, mantissa;
    int32_t exponent = (bits.i - 0x3f3504f3) >> 23; /* |x| = 2^exponent·m, m from √½ to √2 */
    mantissa.i = bits.i - exponent * (1 << 23);
    float m = mantissa.f - 1.0f, y = p->polynomial[7];
    for (int i = 6; i >= 0; i--) y = y * m + p->polynomial[i];
    y *= p->scale[(exponent + 127) & 255];
    return bits.i == 0 ? 0.0f : y;
}

INLINE void whole_powers(const float *restrict phi, float *restrict out, int64_t n, int64_t exponent) {
    for (int64_t i = 0; i < n; i++) out[i] = whole_power(phi[i], exponent);
}

static void powers(const Power *p, const float *restrict phi, float *restrict out, int64_t n) {
    float whole[BLOCK], *restrict product = p->broken ? whole : out;
    switch (p->whole) { /* constants, so that the loops have no branches */
        case 0: break;
        case 1: whole_powers(phi, product, n, 1); break;
        case 2: whole_powers(phi, product, n, 2); break;
        case 3: whole_powers(phi, product, n, 3); break;
        case 4: whole_powers(phi, product, n, 4); break;
        default: whole_powers(phi, product, n, p->whole);
    }
    if (!p->broken) return;
    for (int64_t i = 0; i < n; i++) out[i] = broken_power(p, phi[i]);
    if (p->whole)
        for (int64_t i = 0; i < n; i++) out[i] *= whole[i];
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
        for (int64_t i = 0; i < n; i++) move[i] = rate * grad[i];
        return;
    }
    for (int64_t i = 0; i < n; i++) {
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
    for (int64_t i = 0; i < n; i++) {
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
    const uint8_t *restrict active, *restrict trainable;
} View;

/* θ takes the target where it is active and trained, and the move alone where it is trained but hidden */
INLINE void linear(View v, const Item *it, int64_t n) {
    float used = (float)it->decay_active, rest = (float)it->decay_rest;
    for (int64_t i = 0; i < n; i++) {
        int shown = !v.active || v.active[i];
        float target = v.weight[i] + v.move[i], old = v.phi[i];
        float next = (shown ? target : old + target) - (shown ? used : rest) * old;
        next = !v.trainable || v.trainable[i] ? next : old;
        v.phi[i] = next;
        v.weight[i] = shown ? next : 0.0f;
    }
}

/* φ + α|φ|^(α-1)·(target - w), nothing where it is not trained, and zero where the weight would underflow */
INLINE float moved(View v, const Item *it, const Power *p, int64_t i, float factor) {
    int shown = !v.active || v.active[i];
    float old = v.phi[i], theta = old * factor;
    float move = v.move[i] + (v.weight[i] - (shown ? theta : 0.0f));
    if (v.active) move -= (shown ? (float)it->decay_active : (float)it->decay_rest) * theta;
    float next = old + (float)p->alpha * (factor * move);
    next = !v.trainable || v.trainable[i] ? next : old;
    return fabsf(next) <= (float)p->floor ? 0.0f : next;
}

INLINE void whole(View v, const Item *it, const Power *p, int64_t n, int64_t exponent) {
    for (int64_t i = 0; i < n; i++) {
        float next = moved(v, it, p, i, whole_power(v.phi[i], exponent));
        v.phi[i] = next;
        next *= whole_power(next, exponent);
        v.weight[i] = !v.active || v.active[i] ? next : 0.0f;
    }
}

INLINE void broken(View v, const Item *it, const Power *p, int64_t n, float *restrict factor) {
    for (int64_t i = 0; i < n; i++) v.phi[i] = moved(v, it, p, i, factor[i]);
    powers(p, v.phi, factor, n);
    for (int64_t i = 0; i < n; i++) {
        float next = v.phi[i] * factor[i];
        v.weight[i] = !v.active || v.active[i] ? next : 0.0f;
    }
}

INLINE void power(View v, const Item *it, const Power *p, int64_t at, int64_t n) {
    float scratch[BLOCK], *factor = it->factor ? it->factor + at : scratch;
    switch (p->broken ? 0 : p->whole) {
        case 1: whole(v, it, p, n, 1); return;
        case 2: whole(v, it, p, n, 2); return;
        case 3: whole(v, it, p, n, 3); return;
        case 4: whole(v, it, p, n, 4); return;
        default:
            if (!it->factor) powers(p, v.phi, factor, n);
            broken(v, it, p, n, factor);
    }
}

static void plain(View v, int64_t n) {
    for (int64_t i = 0; i < n; i++) v.weight[i] += v.move[i];
}

static void only_masked(View v, int64_t n) {
    for (int64_t i = 0; i < n; i++) v.weight[i] = v.active[i] ? v.weight[i] + v.move[i] : 0.0f;
}

/* A constant NULL lets the compiler leave the mask out of the loops. */
static void absorb(View v, const Item *it, const Power *p, int64_t at, int64_t n) {
    View dense = {v.weight, v.phi, v.move, NULL, NULL}, used = {v.weight, v.phi, v.move, v.active, NULL};
    View trained = {v.weight, v.phi, v.move, NULL, v.trainable};
    int masks = (v.active != NULL) + 2 * (v.trainable != NULL);
    if (it->kind == PLAIN) plain(v, n);
    else if (it->kind == MASKED) only_masked(v, n);
    else if (it->kind == LINEAR && masks == 1) linear(used, it, n);
    else if (it->kind == LINEAR && masks == 2) linear(trained, it, n);
    else if (it->kind == LINEAR) linear(v, it, n);
    else if (masks == 0) power(dense, it, p, at, n);
    else if (masks == 1) power(used, it, p, at, n);
    else if (masks == 2) power(trained, it, p, at, n);
    else power(v, it, p, at, n);
}

static void stretch(const Item *it, const Group *g, const Power *p, int64_t from, int64_t to) {
    float move[BLOCK];
    for (int64_t at = from; at < to; at += BLOCK) {
        int64_t n = to - at < BLOCK ? to - at : BLOCK;
        base_move(g, it, at, move, n);
        View v = {it->weight + at, it->phi ? it->phi + at : NULL, move, it->active ? it->active + at : NULL,
                  it->trainable ? it->trainable + at : NULL};
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
