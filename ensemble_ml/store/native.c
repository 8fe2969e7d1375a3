/* Loops over packed fields for which NumPy would pass over memory again and again.

   `scripts/hatch_build.py` compiles this file when the package is installed, where there is a compiler, and
   `ensemble_ml/store/native.py` calls it. Everything rounds as NumPy does, operation for operation (no fused
   multiply-add: -ffp-contract=off), so results do not depend on whether it was compiled; tests hold one to the other.
   No function here allocates, keeps anything, or may be given arrays that overlap. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE
#define SOURCE 0
#endif
#define SUMS 5
#define LANES 256 /* partial sums of a level: every so many points go into one */
#define TILE 128 /* points at a time, a divisor of LANES: what ten members need of them lies in the innermost cache */

#if defined(__FAST_MATH__) || defined(__INTEL_COMPILER) || defined(__INTEL_LLVM_COMPILER)
#error "sums would be taken in another order than NumPy's"
#endif

/* One version for each level of x86-64; others compile what their flags say. */
#if defined(__clang__) ? __clang_major__ >= 18 : __GNUC__ >= 12
#define KNOWS_LEVELS 1
#endif
#if defined(KNOWS_LEVELS) && defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define INLINE static inline __attribute__((always_inline))

/* An integer whose octets stand in the other order where `swapped` says so. */
INLINE uint16_t turned(uint16_t code, int swapped)
{
    return swapped ? (uint16_t)(code << 8 | code >> 8) : code;
}

/* Values of packed integers: ((X * scale) + reference) * decimal in float64, rounded; or, where `exact` says that it
   gives the same bits, in float32. */
INLINE void values_of(const uint16_t *restrict codes, size_t points, double reference, double scale, double decimal,
                      int exact, int swapped, float *restrict out)
{
    if (exact) {
        const float low = (float)reference, step = (float)scale;
        for (size_t i = 0; i < points; i++)
            out[i] = (float)turned(codes[i], swapped) * step + low;
    } else {
        for (size_t i = 0; i < points; i++)
            out[i] = (float)(((double)turned(codes[i], swapped) * scale + reference) * decimal);
    }
}

/* Sum `count` rows of TILE by pairs of halves into the first, as `fuse._pairs` does; rows are used up. */
INLINE void add_pairs(float *restrict rows, size_t count, size_t points)
{
    while (count > 1) {
        const size_t half = count / 2, other = count - half;
        for (size_t row = 0; row < half; row++) {
            float *restrict sum = rows + row * TILE;
            const float *restrict more = rows + (other + row) * TILE;
            for (size_t i = 0; i < points; i++)
                sum[i] += more[i];
        }
        count = other;
    }
}

/* Which text was compiled, so that no other is called by mistake. */
uint32_t eml_source(void) { return SOURCE; }

/* Decode fields of `points` packed integers each to float32; a step is what lies between fields, in elements.
   `swapped`: the octets of integers stand in the other order than this machine's, as those of a file may. */
FOR_EACH_PROCESSOR
void eml_decode(const uint16_t *restrict codes, ptrdiff_t codes_step, float *restrict out, ptrdiff_t out_step,
                size_t fields, size_t points, const double *reference, const double *scale, const double *decimal,
                int exact, int swapped)
{
    for (size_t f = 0; f < fields; f++) {
        const uint16_t *from = codes + (ptrdiff_t)f * codes_step;
        float *to = out + (ptrdiff_t)f * out_step;
        if (swapped) /* known when it is compiled, twice */
            values_of(from, points, reference[f], scale[f], decimal[f], exact, 1, to);
        else
            values_of(from, points, reference[f], scale[f], decimal[f], exact, 0, to);
    }
}

/* How the members of a level are packed; nothing says that they are float32 as they stand. The factors of a member lie
   `step` beyond those of the one before. */
struct packing {
    const double *reference, *scale, *decimal;
    size_t step;
    int exact;
};

/* Every place of `least` and `most` takes the smaller and the larger of itself and the value. */
INLINE void widen(float *restrict least, float *restrict most, const float *restrict values, size_t points)
{
    for (size_t i = 0; i < points; i++) {
        least[i] = values[i] < least[i] ? values[i] : least[i];
        most[i] = values[i] > most[i] ? values[i] : most[i];
    }
}

/* The smallest of `least` and the largest of `most`. */
INLINE void ends_of(const float *least, const float *most, float *out)
{
    out[0] = INFINITY, out[1] = -INFINITY;
    for (size_t i = 0; i < TILE; i++) {
        out[0] = least[i] < out[0] ? least[i] : out[0];
        out[1] = most[i] > out[1] ? most[i] : out[1];
    }
}

/* What `fuse._mean_and_spread` and `fuse._sums` do for one level. `rows` holds 2 * members * TILE floats, `lanes`
   SUMS * LANES doubles; `fields`: those of the first member, of the next `member_step` further. `extremes`, of float32
   members, are the smallest and the largest value. */
INLINE void fuse_level(const void *fields, ptrdiff_t member_step, size_t members, size_t points,
                       const struct packing *packing, float *restrict mean, float *restrict spread,
                       double *restrict sums, float *restrict ends, float *restrict extremes, float *restrict rows,
                       double *restrict lanes)
{
    const float share = (float)(1.0 / (double)members), freedom = (float)(1.0 / (double)(members - 1));
    float *restrict apart = rows, *restrict squares = rows + members * TILE;
    float low[3][TILE], high[3][TILE]; /* of mean, spread and members */
    double mean_0 = 0, spread_0 = 0;
    for (size_t i = 0; i < SUMS * LANES; i++)
        lanes[i] = 0;
    for (size_t of = 0; of < 3; of++)
        for (size_t i = 0; i < TILE; i++)
            low[of][i] = INFINITY, high[of][i] = -INFINITY;
    for (size_t start = 0; start < points; start += TILE) {
        const size_t size = points - start < TILE ? points - start : TILE;
        double *of_mean = lanes + start % LANES, *of_spread = of_mean + 2 * LANES, *lost = of_mean + 4 * LANES;
        float *restrict middle = mean + start, *restrict deviation = spread + start;
        for (size_t m = 0; m < members; m++) {
            const ptrdiff_t place = (ptrdiff_t)m * member_step + (ptrdiff_t)start;
            float *restrict values = apart + m * TILE;
            if (packing) {
                values_of((const uint16_t *)fields + place, size, packing->reference[m * packing->step],
                          packing->scale[m * packing->step], packing->decimal[m * packing->step], packing->exact, 0,
                          values);
            } else {
                memcpy(values, (const float *)fields + place, size * sizeof(float));
                widen(low[2], high[2], values, size);
            }
        }
        for (size_t m = 1; m < members; m++) {
            float *restrict d = apart + m * TILE, *restrict q = squares + m * TILE;
            for (size_t i = 0; i < size; i++) {
                d[i] -= apart[i];
                q[i] = d[i] * d[i];
            }
        }
        add_pairs(apart + TILE, members - 1, size);
        add_pairs(squares + TILE, members - 1, size);
        const float *restrict total = apart + TILE, *restrict square = squares + TILE;
        for (size_t i = 0; i < size; i++) {
            const float rest = square[i] - total[i] * total[i] * share, more = total[i] * share;
            deviation[i] = sqrtf((rest < 0 ? 0 : rest) * freedom);
            middle[i] = apart[i] + more;
            lost[i] += (double)((apart[i] - middle[i]) + more);
        }
        if (!start) {
            mean_0 = middle[0];
            spread_0 = deviation[0];
        }
        for (size_t i = 0; i < size; i++) {
            const double a = (double)middle[i] - mean_0, b = (double)deviation[i] - spread_0;
            of_mean[i] += a;
            of_mean[LANES + i] += a * a;
            of_spread[i] += b;
            of_spread[LANES + i] += b * b;
        }
        widen(low[0], high[0], middle, size);
        widen(low[1], high[1], deviation, size);
    }
    for (size_t sum = 0; sum < SUMS; sum++) {
        double *lane = lanes + sum * LANES;
        for (size_t half = LANES / 2; half; half /= 2)
            for (size_t i = 0; i < half; i++)
                lane[i] += lane[half + i];
        sums[sum] = lane[0];
    }
    ends_of(low[0], high[0], ends);
    ends_of(low[1], high[1], ends + 2);
    if (!packing)
        ends_of(low[2], high[2], extremes);
}

/* Mean and spread (ddof = 1) over two or more members, level by level; see `ensemble_ml/store/fuse.py`.

   `codes` (members, levels, points), with steps between members and levels; factors (members, levels); `exact`
   (levels). Out: `mean`, `spread` (levels, points), `sums` (levels, SUMS), `ends` (levels, 4). */
FOR_EACH_PROCESSOR
void eml_fuse(const uint16_t *codes, ptrdiff_t member_step, ptrdiff_t level_step, size_t members, size_t levels,
              size_t points, const double *reference, const double *scale, const double *decimal, const uint8_t *exact,
              float *restrict mean, float *restrict spread, double *restrict sums, float *restrict ends,
              float *restrict rows, double *restrict lanes)
{
    for (size_t z = 0; z < levels; z++) {
        const struct packing packing = {reference + z, scale + z, decimal + z, levels, exact[z]};
        fuse_level(codes + (ptrdiff_t)z * level_step, member_step, members, points, &packing, mean + z * points,
                   spread + z * points, sums + z * SUMS, ends + z * 4, 0, rows, lanes);
    }
}

/* The same of float32 `values`; also out: `extremes` (levels, 2). Nothing holds of a level whose `sums` have a NaN. */
FOR_EACH_PROCESSOR
void eml_fuse_plain(const float *values, ptrdiff_t member_step, ptrdiff_t level_step, size_t members, size_t levels,
                    size_t points, float *restrict mean, float *restrict spread, double *restrict sums,
                    float *restrict ends, float *restrict extremes, float *restrict rows, double *restrict lanes)
{
    for (size_t z = 0; z < levels; z++)
        fuse_level(values + (ptrdiff_t)z * level_step, member_step, members, points, 0, mean + z * points,
                   spread + z * points, sums + z * SUMS, ends + z * 4, extremes + z * 2, rows, lanes);
}
