/* Loops over packed fields for which NumPy would pass over memory again and again.

   `scripts/hatch_build.py` compiles this file when the package is installed, where there is a compiler, and
   `ensemble_ml/store/native.py` calls it. Everything rounds as NumPy does, operation for operation (no fused
   multiply-add: -ffp-contract=off), so results do not depend on whether it was compiled; tests hold one to the other.
   No function here allocates, keeps anything, or may be given arrays that overlap. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifndef SOURCE
#define SOURCE 0
#endif
#define SUMS 5
#define TILE 256 /* points at a time: what ten members need of them lies in the innermost cache */

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

/* Values of packed integers: ((X * scale) + reference) * decimal in float64, rounded; or, where `exact` says that it
   gives the same bits, in float32. */
INLINE void values_of(const uint16_t *restrict codes, size_t points, double reference, double scale, double decimal,
                      int exact, float *restrict out)
{
    if (exact) {
        const float low = (float)reference, step = (float)scale;
        for (size_t i = 0; i < points; i++)
            out[i] = (float)codes[i] * step + low;
    } else {
        for (size_t i = 0; i < points; i++)
            out[i] = (float)(((double)codes[i] * scale + reference) * decimal);
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

/* Decode fields of `points` packed integers each to float32; a step is what lies between fields, in elements. */
FOR_EACH_PROCESSOR
void eml_decode(const uint16_t *restrict codes, ptrdiff_t codes_step, float *restrict out, ptrdiff_t out_step,
                size_t fields, size_t points, const double *reference, const double *scale, const double *decimal,
                int exact)
{
    for (size_t f = 0; f < fields; f++)
        values_of(codes + (ptrdiff_t)f * codes_step, points, reference[f], scale[f], decimal[f], exact,
                  out + (ptrdiff_t)f * out_step);
}

/* What `fuse._mean_and_spread` and `fuse._sums` do for one level. `rows` holds 2 * members * TILE floats, `lanes`
   SUMS * TILE doubles; `codes` and factors: those of the first member, of the next a step further. */
INLINE void fuse_level(const uint16_t *codes, ptrdiff_t codes_step, size_t members, size_t points,
                       const double *reference, const double *scale, const double *decimal, size_t factor_step,
                       int exact, float *restrict mean, float *restrict spread, double *restrict sums,
                       float *restrict ends, float *restrict rows, double *lanes)
{
    const float share = (float)(1.0 / (double)members), freedom = (float)(1.0 / (double)(members - 1));
    float *restrict apart = rows, *restrict squares = rows + members * TILE;
    double *of_mean = lanes, *of_spread = lanes + 2 * TILE, *lost = lanes + 4 * TILE;
    double mean_0 = 0, spread_0 = 0;
    float lowest = INFINITY, highest = -INFINITY, least = INFINITY, most = -INFINITY;
    for (size_t i = 0; i < SUMS * TILE; i++)
        lanes[i] = 0;
    for (size_t start = 0; start < points; start += TILE) {
        const size_t size = points - start < TILE ? points - start : TILE;
        float *restrict middle = mean + start, *restrict deviation = spread + start;
        for (size_t m = 0; m < members; m++)
            values_of(codes + (ptrdiff_t)m * codes_step + start, size, reference[m * factor_step],
                      scale[m * factor_step], decimal[m * factor_step], exact, apart + m * TILE);
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
            of_mean[TILE + i] += a * a;
            of_spread[i] += b;
            of_spread[TILE + i] += b * b;
        }
        for (size_t i = 0; i < size; i++) {
            lowest = middle[i] < lowest ? middle[i] : lowest;
            highest = middle[i] > highest ? middle[i] : highest;
            least = deviation[i] < least ? deviation[i] : least;
            most = deviation[i] > most ? deviation[i] : most;
        }
    }
    for (size_t sum = 0; sum < SUMS; sum++) {
        double *lane = lanes + sum * TILE;
        for (size_t half = TILE / 2; half; half /= 2)
            for (size_t i = 0; i < half; i++)
                lane[i] += lane[half + i];
        sums[sum] = lane[0];
    }
    ends[0] = lowest, ends[1] = highest, ends[2] = least, ends[3] = most;
}

/* Mean and spread (ddof = 1) over two or more members, level by level; see `ensemble_ml/store/fuse.py`.

   `codes` (members, levels, points), with steps between members and levels; factors (members, levels); `exact`
   (levels). Out: `mean`, `spread` (levels, points), `sums` (levels, SUMS), `ends` (levels, 4). */
FOR_EACH_PROCESSOR
void eml_fuse(const uint16_t *codes, ptrdiff_t member_step, ptrdiff_t level_step, size_t members, size_t levels,
              size_t points, const double *reference, const double *scale, const double *decimal, const uint8_t *exact,
              float *restrict mean, float *restrict spread, double *restrict sums, float *restrict ends,
              float *restrict rows, double *lanes)
{
    for (size_t z = 0; z < levels; z++)
        fuse_level(codes + (ptrdiff_t)z * level_step, member_step, members, points, reference + z, scale + z,
                   decimal + z, levels, exact[z], mean + z * points, spread + z * points, sums + z * SUMS, ends + z * 4,
                   rows, lanes);
}
