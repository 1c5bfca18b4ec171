/* Vectors of 16 floats, which the compiler splits where registers are narrower, and sparse rows of weights. */

#ifndef POWERPROP_LANES_H
#define POWERPROP_LANES_H

#include <stdint.h>
#include <string.h>
#define INLINE static inline __attribute__((always_inline))
#ifdef POWERPROP_CLONES /* CMakeLists.txt has tried it */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { LANES = 16 };
typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(64), aligned(4)));

INLINE Lanes load(const float *p) { Lanes v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, Lanes v) { memcpy(p, &v, sizeof v); }
INLINE Lanes positive(Lanes x) { return (Lanes)((Bits)x & ~(Bits)(x < 0)); } /* NaN stays */

/* Activations as [channels, height, width, batch] with room between channels and rows: distances in floats. */
typedef struct { float *data; int64_t channel, row; } Plane;

/* The weights of a product, by blocks of inputs and in each by outputs: those of output o in block b are at
   ptr[b * rows + o] .. ptr[b * rows + o + 1], each with the distance of its input from where the tile begins. */
typedef struct { const int32_t *ptr, *at; const float *v, *bias; int64_t rows, blocks; } Weights;

/* Share t of T of a count. */
INLINE int64_t part(int64_t count, int64_t t, int64_t T) { return count * t / T; }

void product(Weights w, Plane x, Plane y, Plane add, int64_t from, int64_t to, int64_t lanes, int relu, int64_t t, int64_t T);

#endif
