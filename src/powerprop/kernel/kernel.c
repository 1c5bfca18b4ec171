/* What no library has: Powerprop's update of a weight, in one pass over memory, and the exact k-th smallest number.

   Plain loops over blocks that the compiler makes vectors of, so that one source serves AVX-512, AVX2, SSE and NEON;
   where it can, it makes a version for each of x86's and the processor picks its own. Nothing is kept between calls.
   `__init__.py` checks every address that arrives here; `update.py` has the same rule in torch and in words. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#define INLINE static inline __attribute__((always_inline))
#ifdef POWERPROP_CLONES /* CMakeLists.txt has tried it */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

static const float TINY = 0x1p-126f; /* the smallest normal number: what is below is slow, and counts as 0 */
typedef union { float number; int32_t bits; } Both;
INLINE int32_t bits_of(float x) { return (Both){.number = x}.bits; }
INLINE float number(int32_t bits) { return (Both){.bits = bits}.number; }

/* By bits, so that neither a NaN nor an infinity passes, and compilers make no jumps of it. */
INLINE float only(int32_t mask, float x) { return number(bits_of(x) & mask); }
INLINE float either(int32_t mask, float x, float y) { return number((bits_of(x) & mask) | (bits_of(y) & ~mask)); }
INLINE float normal(float x) { return only(-(!(fabsf(x) < TINY)), x); }
INLINE float with_sign_of(float w, float x) { return number(bits_of(x) ^ (bits_of(w) & INT32_MIN)); }

/* For numbers that are not negative, NaN included: they are in the order of their bits. */
INLINE float between(float low, float x, float high) {
    int32_t i = bits_of(x) < bits_of(low) ? bits_of(low) : bits_of(x);
    return number(i > bits_of(high) ? bits_of(high) : i);
}

/* Negative for a number (without its sign) that is not at most the limit, NaN included */
INLINE int32_t beyond(float limit, float x) { return bits_of(limit) - (bits_of(x) & INT32_MAX); }

/* Σ cᵢxⁱ */
INLINE float polynomial(const float *c, int count, float x) {
    float y = c[count - 1];
    for (int i = count - 2; i >= 0; i--) y = y * x + c[i];
    return y;
}

/* --- what depends on α alone -------------------------------------------------------------------------------------- */

enum { TERMS = 8, SHORT = 6 };
typedef struct {
    float high, low;       /* the exponent in two parts: a whole number times the first is exact */
    float mantissa[TERMS]; /* m^exponent in powers of m - 1, for m from √½ to √2 */
} Power;
typedef struct {
    double alpha;
    float near, wild;   /* |r| up to the first is a series, beyond the second double precision */
    float scale, limit, steep; /* 1/ρ, the largest s² that counts, and a little less than the |w| that has it */
    float growth[SHORT]; /* ((1 + r)^α - 1) / r in powers of r */
    Power first, second; /* |w|^(1-2/α) and |1 + r|^(α-1) */
} Rule;

static double power_of(double x, double exponent) { return pow(1 + x, exponent); }
static double growth_of(double r, double alpha) { return expm1(alpha * log1p(r)) / r; }
/* The polynomial that meets f at Chebyshev's points of an interval: Newton's form, multiplied out. `count` is even. */
static void fit(double (*f)(double, double), double parameter, double from, double to, float *out, int count) {
    double x[TERMS], y[TERMS], c[TERMS] = {0};
    for (int i = 0; i < count; i++)
        y[i] = f(x[i] = (from + to) / 2 + (to - from) / 2 * cos((i + 0.5) * 3.141592653589793 / count), parameter);
    for (int width = 1; width < count; width++)
        for (int i = count - 1; i >= width; i--) y[i] = (y[i] - y[i - 1]) / (x[i] - x[i - width]);
    for (int i = count - 1; i >= 0; i--)
        for (int j = count - 1; j >= 0; j--) c[j] = (j ? c[j - 1] : y[i]) - x[i] * c[j];
    for (int i = 0; i < count; i++) out[i] = (float)c[i];
}

static void fit_power(Power *p, double exponent) {
    p->high = (float)(rint(exponent * 65536) / 65536), p->low = (float)(exponent - p->high);
    fit(power_of, exponent, sqrt(0.5) - 1, sqrt(2) - 1, p->mantissa, TERMS);
}

/* Beyond α = 5, |1 + r|^(α-1) is no polynomial of so few terms: all that is far is taken for wild. */
static Rule rule_of(double alpha) {
    Rule c = {.alpha = alpha, .near = alpha > 5 ? (float)(0.75 / alpha) : 0.25f, .wild = alpha > 5 ? 0 : 0x1p20f};
    if (alpha == 1 || alpha == 2) return c; /* no powers */
    fit(growth_of, alpha, -c.near, c.near, c.growth, SHORT);
    fit_power(&c.first, 1 - 2 / alpha);
    fit_power(&c.second, alpha - 1);
    return c;
}

/* --- the rule: r = α·move·sign(w)|w|^(1-2/α), w ← w(1 + r)|1 + r|^(α-1) -------------------------------------------- */

enum { BLOCK = 128 }; /* numbers at a time */
#define EACH for (int i = 0; i < BLOCK; i++)

/* x = 2^k·m and exponent·k = q + r with whole q, so that x^exponent = 2^q·2^r·m^exponent, a normal number */
INLINE float power(const Power *p, float x) {
    static const float shift = 0x1.8p23f; /* a sum with it has no bits behind the point */
    static const float two[SHORT] = {1.00000012f, 0.693147182f, 0.240221068f, 0.0555035695f, 0.00967603177f, 0.00133908633f};
    int32_t k = (bits_of(x) - 0x3f3504f3) >> 23;
    float m = number(bits_of(x) - k * (1 << 23)), product = p->high * (float)k, q = product + shift;
    float root = polynomial(two, SHORT, p->low * (float)k + (product - (q - shift))); /* 2^r */
    uint32_t scaled = (uint32_t)bits_of(root) + ((uint32_t)bits_of(q) << 23);
    return polynomial(p->mantissa, TERMS, m - 1) * number((int32_t)scaled);
}

/* Through φ, for moves that are wild, infinite or NaN: it overflows only where the result does */
static float through_phi(double alpha, float w, float move) {
    double size = fmax(fabsf(w), TINY), root = pow(size, 1 / alpha);
    double phi = root + alpha * copysign(1, w) * move * (size / root);
    return (float)copysign(pow(fabs(phi), alpha), signbit(w) ? -phi : phi);
}

/* The lanes far from 0 in r, packed together, sixteen at a time */
INLINE void mend(const Rule *c, const float *w, const float *move, const float *r, float *x) {
    int32_t place[BLOCK], count = 0;
    float y[BLOCK] = {0}, rest[BLOCK];
    EACH place[count] = i, count += !(fabsf(r[i]) <= c->near);
    for (int n = 0; n < count; n++) y[n] = 1 + r[place[n]];
    for (int n = 0; n < count; n += 16)
        for (int i = n; i < n + 16; i++) rest[i] = y[i] * power(&c->second, between(0x1p-24f, fabsf(y[i]), 0x1p21f));
    for (int n = 0; n < count; n++) {
        int i = place[n];
        x[i] = fabsf(r[i]) <= c->wild ? with_sign_of(w[i], fmaxf(fabsf(w[i]), TINY)) * rest[n]
                                      : through_phi(c->alpha, w[i], move[i]);
        x[i] += w[i] - w[i]; /* nothing, but NaN for weights that are no numbers */
    }
}

/* A move divided by ρ; where the slope s² may be above its limit, as if it were the limit. Unmatched, it stays as it is. */
INLINE float divided(const Rule *c, int limited, float square, float move) {
    float share = limited ? c->limit / (square < TINY ? TINY : square) : 1;
    return move * c->scale * (share < 1 ? share : 1);
}

/* Nearly all lanes are near 0 in r: a series added to w is exact where the move is zero. The few others come after. */
INLINE void follow(const Rule *c, int limited, const float *restrict w, float *restrict move, float *restrict x) {
    float r[BLOCK], alpha = (float)c->alpha;
    int32_t far = 0;
    EACH {
        float size = between(TINY, fabsf(w[i]), 0x1p125f), root = alpha * power(&c->first, size);
        move[i] = divided(c, limited, alpha * root * size, move[i]);
        r[i] = root * with_sign_of(w[i], only(-(w[i] != 0), move[i]));
        x[i] = w[i] + w[i] * (r[i] * polynomial(c->growth, SHORT, r[i]));
        far |= beyond(c->near, r[i]);
    }
    if (far < 0) mend(c, w, move, r, x);
}

/* α = 2: no power at all */
INLINE void follow_square(const Rule *c, int limited, const float *restrict w, const float *restrict move, float *restrict x) {
    float r[BLOCK];
    int32_t far = 0;
    EACH {
        float push = divided(c, limited, 4 * fabsf(w[i]), move[i]);
        r[i] = 2 * with_sign_of(w[i], only(-(w[i] != 0), push));
        x[i] = w[i] + w[i] * (r[i] * (r[i] + 2));
        far |= beyond(c->near, r[i]);
    }
    if (far < 0) EACH {
        float y = 1 + r[i], there = with_sign_of(w[i], between(TINY, fabsf(w[i]), INFINITY)) * y * fabsf(y);
        x[i] = either(-(fabsf(r[i]) <= c->near), x[i], there + (w[i] - w[i]));
    }
}

typedef struct {
    float *target;       /* where the base optimiser left the weight; becomes the new weight */
    const float *before; /* θ before its step */
    float *theta;        /* becomes the new θ; may be `before`, or absent */
    const uint8_t *active, *trainable;
    int64_t size;
    double alpha, shrink, decay_active, decay_rest; /* shrink: of the weight, not of φ */
    double rate, limit; /* ρ and the largest s² that counts; ρ = 0 where they are to be found */
} Move;

enum { LINEAR, SQUARE, OTHER };
INLINE void widen(const uint8_t *mask, int32_t *restrict out) { EACH out[i] = mask ? -(mask[i] != 0) : -1; }
/* What a block starts from: θ, how far it is to go, and what α = 1 makes of it; without masks, decay and θ if `plain` */
typedef struct {
    float w[BLOCK], move[BLOCK], x[BLOCK];
    int32_t active[BLOCK], trainable[BLOCK];
} Block;
INLINE void read_block(const Move *m, Block *b, int plain) {
    if (plain) {
        EACH b->w[i] = m->before[i], b->move[i] = m->target[i] - b->w[i];
        return;
    }
    float used = (float)m->decay_active, hidden = (float)m->decay_rest;
    int32_t decays = -(used != 0 || hidden != 0);
    widen(m->active, b->active);
    widen(m->trainable, b->trainable);
    EACH {
        int32_t active = b->active[i], trainable = b->trainable[i];
        float shown = only(active & trainable, m->before[i]), goal = only(trainable, m->target[i]);
        b->w[i] = only(trainable, m->before[i]);
        b->move[i] = goal - shown - only(decays, either(active, used, hidden) * b->w[i]);
        b->x[i] = either(active & ~decays, goal, b->w[i] + b->move[i]);
    }
}

/* A block; `kind` and `plain` are constants. */
INLINE void update(const Move *m, const Rule *c, int kind, int plain) {
    Block b;
    float shrink = (float)m->shrink;
    int32_t limited = 0;
    read_block(m, &b, plain);
    EACH limited |= beyond(c->steep, b.w[i]);
    if (kind == OTHER) limited < 0 ? follow(c, 1, b.w, b.move, b.x) : follow(c, 0, b.w, b.move, b.x);
    if (kind == SQUARE) limited < 0 ? follow_square(c, 1, b.w, b.move, b.x) : follow_square(c, 0, b.w, b.move, b.x);
    if (plain) {
        EACH m->target[i] = normal(shrink * b.x[i]);
        return;
    }
    EACH b.x[i] = either(b.trainable[i], kind == LINEAR ? shrink * b.x[i] : normal(shrink * b.x[i]), m->before[i]);
    if (m->theta) EACH m->theta[i] = b.x[i];
    EACH m->target[i] = only(b.active[i], b.x[i]);
}

/* --- matched rates: what `matched` in update.py does with torch --------------------------------------------------- */

enum { SIZES, MOVES, STRIPS = 64, LANES = 16 };
static const double STEEPEST = 4, FARTHEST = 0.05;

/* Sums in lanes, each of its own, and always added in one order */
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef struct {
    Lanes first, second, third;
} Sums;
INLINE void add(Lanes *sum, const float *x) {
    Lanes part;
    for (int i = 0; i < BLOCK; i += LANES) memcpy(&part, x + i, sizeof part), *sum += part;
}

/* Adds 1, |w|, w² of the weights that are used and move; or, for their proposals p, p², s²p², (s²p)² */
INLINE void sum_block(const Move *m, const Rule *c, Sums *sums, int what, int kind, int plain) {
    Block b;
    float first[BLOCK], second[BLOCK], third[BLOCK], limit = (float)m->limit, alpha = (float)c->alpha;
    read_block(m, &b, plain);
    if (!plain) EACH b.active[i] &= b.trainable[i], b.w[i] = only(b.active[i], b.w[i]), b.move[i] = only(b.active[i], b.move[i]);
    if (what == SIZES) EACH first[i] = plain ? 1 : (float)-b.active[i], second[i] = fabsf(b.w[i]), third[i] = b.w[i] * b.w[i];
    else EACH {
        float p = b.move[i], size = between(TINY, fabsf(b.w[i]), 0x1p125f);
        float slope = kind == SQUARE ? 4 * size : alpha * alpha * size * power(&c->first, size);
        slope = slope < limit ? slope : limit;
        first[i] = p * p, second[i] = slope * p * p, third[i] = slope * p * (slope * p);
    }
    add(&sums->first, first), add(&sums->second, second), add(&sums->third, third);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

enum { UPDATE = MOVES + 1 };
INLINE void block(const Move *m, const Rule *c, Sums *sums, int what, int kind, int plain) {
    if (what == UPDATE) update(m, c, kind, plain);
    else sum_block(m, c, sums, what, kind, plain);
}

/* The rest of a tensor, in a block of its own */
INLINE void rest(const Move *m, const Rule *c, size_t n, Sums *sums, int what, int kind, int plain) {
    float target[BLOCK] = {0}, before[BLOCK] = {0}, theta[BLOCK];
    uint8_t masks[2][BLOCK] = {{0}};
    Move part = *m;
    part.target = memcpy(target, m->target, n * sizeof *target);
    part.before = memcpy(before, m->before, n * sizeof *before);
    part.theta = m->theta ? theta : NULL;
    part.active = m->active ? memcpy(masks[0], m->active, n) : NULL;
    part.trainable = m->trainable ? memcpy(masks[1], m->trainable, n) : NULL;
    block(&part, c, sums, what, kind, plain);
    if (what != UPDATE) return;
    memcpy(m->target, target, n * sizeof *target);
    if (m->theta) memcpy(m->theta, theta, n * sizeof *theta);
}

INLINE void blocks(const Move *m, const Rule *c, int64_t at, int64_t to, Sums *sums, int what, int kind, int plain) {
    for (; at < to; at += BLOCK) {
        Move here = *m;
        here.target += at, here.before += at;
        if (m->theta) here.theta += at;
        if (m->active) here.active += at;
        if (m->trainable) here.trainable += at;
        if (at + BLOCK <= to) block(&here, c, sums, what, kind, plain);
        else rest(&here, c, (size_t)(to - at), sums, what, kind, plain);
    }
}

/* Constants, so that the loops have no questions in them */
INLINE void some(const Move *m, const Rule *c, int64_t from, int64_t to, Sums *sums, int what, int kind) {
    int more = m->active || m->trainable || m->theta || m->decay_active != 0 || m->decay_rest != 0;
    more ? blocks(m, c, from, to, sums, what, kind, 0) : blocks(m, c, from, to, sums, what, kind, 1);
}
CLONES static void stretch(const Move *m, const Rule *c, int64_t from, int64_t to) {
    if (m->alpha == 1) blocks(m, c, from, to, NULL, UPDATE, LINEAR, 0);
    else if (m->alpha == 2) some(m, c, from, to, NULL, UPDATE, SQUARE);
    else some(m, c, from, to, NULL, UPDATE, OTHER);
}
CLONES static void add_up(const Move *m, const Rule *c, int64_t from, int64_t to, double *total, int what) {
    Sums sums = {{0}, {0}, {0}};
    if (what == SIZES) some(m, c, from, to, &sums, SIZES, SQUARE);
    else if (m->alpha == 2) some(m, c, from, to, &sums, MOVES, SQUARE);
    else some(m, c, from, to, &sums, MOVES, OTHER);
    for (int i = 0; i < LANES; i++) total[0] += sums.first[i], total[1] += sums.second[i], total[2] += sums.third[i];
}

/* In strips of the tensor's own, whose sums are added in their order whatever the threads; none long in float32 */
static void sums_of(const Move *m, const Rule *c, int threads, int what, double *sums) {
    const int64_t length = 64 * BLOCK, strips = (m->size + length - 1) / length, each = (strips + STRIPS - 1) / STRIPS;
    double totals[STRIPS][3] = {{0}};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m->size > 1 << 15)
    for (int i = 0; i < STRIPS; i++)
        for (int64_t at = i * each * length; at < (i + 1) * each * length && at < m->size; at += length)
            add_up(m, c, at, at + length < m->size ? at + length : m->size, totals[i], what);
    for (int i = 0; i < STRIPS; i++)
        for (int j = 0; j < 3; j++) sums[j] += totals[i][j];
}

static void find_rate(Move *m, const Rule *c, int threads) {
    double sizes[3] = {0}, moves[3] = {0};
    sums_of(m, c, threads, SIZES, sizes);
    double count = m->active || m->trainable ? sizes[0] : (double)m->size, rate = 0;
    m->rate = 1, m->limit = INFINITY;
    if (count == 0 || sizes[2] == 0) return;
    m->limit = STEEPEST * m->alpha * m->alpha * pow(fmax(sizes[1] / count, TINY), 2 - 2 / m->alpha);
    sums_of(m, c, threads, MOVES, moves);
    if (moves[0] != 0) {
        double kept = moves[1] / moves[0], bound = sqrt(moves[2] / sizes[2]) / FARTHEST;
        rate = kept >= bound ? kept : bound;
    }
    if (rate > 0 && isfinite(rate)) m->rate = rate;
    else m->limit = INFINITY;
}

/* One tensor after the other, so that tensors that share memory are moved in their order whatever the threads. */
void powerprop_update(const Move *moves, int64_t count, int threads) {
    const int64_t length = 1 << 15;
    Rule c = {.alpha = 0};
    for (int64_t i = 0; i < count; i++) {
        Move m = moves[i];
        if (m.alpha != c.alpha) c = rule_of(m.alpha);
        if (m.rate == 0) find_rate(&m, &c, threads);
        c.scale = (float)(1 / m.rate), c.limit = (float)m.limit, c.steep = 0x1p125f;
        if (m.alpha > 1 && m.limit < INFINITY) /* s² = α²|w|^(2-2/α) */
            c.steep = (float)fmin(0.9999 * pow(m.limit / (m.alpha * m.alpha), 0.5 / (1 - 1 / m.alpha)), c.steep);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m.size > length)
        for (int64_t at = 0; at < m.size; at += length)
            stretch(&m, &c, at, at + length < m.size ? at + length : m.size);
    }
}

#ifndef POWERPROP_SOURCES
#define POWERPROP_SOURCES ""
#endif
const char powerprop_sources[] = POWERPROP_SOURCES; /* their checksums, by which a library of other sources is known */

/* Numbers without sign in the order of the floats, NaN last as in numpy */
INLINE uint32_t ordered(float x) {
    uint32_t bits = (uint32_t)bits_of(x);
    return x != x ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The number at position k of the sorted n, 0 <= k < n, by counting 11 + 11 + 10 of the floats' bits in three passes */
float powerprop_kth(const float *x, int64_t n, int64_t k) {
    static const int shifts[3] = {21, 10, 0};
    static const uint32_t lasts[3] = {2047, 2047, 1023};
    uint32_t prefix = 0, known = 0;
    for (int pass = 0; pass < 3; pass++) {
        int64_t counts[4][2048] = {{0}}; /* four, or equal numbers in a row would wait for each other */
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = ordered(x[i]);
            if ((key & known) == prefix) counts[i & 3][key >> shifts[pass] & lasts[pass]]++;
        }
        uint32_t bin = 0;
        for (int64_t here; (here = counts[0][bin] + counts[1][bin] + counts[2][bin] + counts[3][bin]) <= k; bin++) k -= here;
        prefix |= bin << shifts[pass];
        known |= lasts[pass] << shifts[pass];
    }
    return number((int32_t)(prefix & 0x80000000u ? prefix & 0x7fffffffu : ~prefix));
}
