// Kernels for a CPU in bfloat16. In decode attention, each row has one query per head and attends only to its own
// positions. The order of every sum depends on the row's own length, never on other rows. GCC and Clang compile the
// vectors for any processor; with AVX-512, one vector fills one register.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define AHEAD 12  // positions to prefetch: the hardware prefetches strided heads badly
#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t half __attribute__((vector_size(32)));

INLINE vec widen(const uint16_t *p) {
    half x;
    memcpy(&x, p, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}

INLINE void narrow(uint16_t *p, vec x) {  // to nearest, ties to even; a NaN keeps its upper bits
    const uvec bits = (uvec)x;
    const uvec is_nan = (uvec)(x != x);
    const half y = __builtin_convertvector((bits + (~is_nan & (0x7fff + ((bits >> 16) & 1)))) >> 16, half);
    memcpy(p, &y, sizeof y);
}

INLINE float sum(vec x) {
    float v[LANES];
    memcpy(v, &x, sizeof v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
}

// e^x for x <= 0, with an error of 2e-7: 2^n times a polynomial of the rest (Cephes). 0 below -87; NaN for NaN.
INLINE vec exponential(vec x) {
    const ivec is_tiny = x < -87.0f;
    x = (vec)((ivec)x & ~is_tiny);
    const ivec n = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec);
    const vec whole = __builtin_convertvector(n, vec), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (vec)((ivec)(y * (vec)((n + 127) << 23)) & ~is_tiny);
}

INLINE void rows(const uint16_t *query, const uint16_t *keys, const uint16_t *values, uint16_t *out,
                 const int32_t *lengths, float *scores, int64_t num_rows, int64_t slot_length, int64_t kv_heads,
                 int64_t window, float scale, const int group, const int chunks) {
    const int dim = chunks * LANES;
    const int64_t token = kv_heads * dim;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t end = lengths[row], begin = window > 0 && end > window ? end - window : 0;
        const int64_t count = end - begin, padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t first = (row * kv_heads + head) * group * dim;
            const uint16_t *k = keys + (row * slot_length + begin) * token + head * dim;
            const uint16_t *v = values + (row * slot_length + begin) * token + head * dim;
            vec state[group * chunks];
            float top[group], total[group];
            for (int i = 0; i < group * chunks; i++) state[i] = widen(query + first + i * LANES) * scale;
            for (int g = 0; g < group; g++) top[g] = -INFINITY;
            for (int64_t p = 0; p < count; p++) {
                vec score[group];
                for (int c = 0; c < chunks; c++) {
                    if (c % 2 == 0) __builtin_prefetch(k + (p + AHEAD) * token + c * LANES);
                    const vec x = widen(k + p * token + c * LANES);
                    for (int g = 0; g < group; g++)
                        score[g] = c ? score[g] + x * state[g * chunks + c] : x * state[g * chunks + c];
                }
                for (int g = 0; g < group; g++) {
                    const float s = scores[g * slot_length + p] = sum(score[g]);
                    top[g] = s > top[g] ? s : top[g];
                }
            }
            for (int g = 0; g < group; g++) {
                float *own = scores + g * slot_length;
                for (int64_t p = count; p < padded; p++) own[p] = -INFINITY;
                vec shares = {0};
                for (int64_t p = 0; p < padded; p += LANES) {
                    vec x;
                    memcpy(&x, own + p, sizeof x);
                    x = exponential(x - top[g]);
                    shares += x;
                    memcpy(own + p, &x, sizeof x);
                }
                total[g] = sum(shares);
            }
            for (int i = 0; i < group * chunks; i++) state[i] = (vec){0};
            for (int64_t p = 0; p < count; p++)
                for (int c = 0; c < chunks; c++) {
                    if (c % 2 == 0) __builtin_prefetch(v + (p + AHEAD) * token + c * LANES);
                    const vec x = widen(v + p * token + c * LANES);
                    for (int g = 0; g < group; g++) state[g * chunks + c] += x * scores[g * slot_length + p];
                }
            for (int i = 0; i < group * chunks; i++)
                narrow(out + first + i * LANES, state[i] / total[i / chunks]);
        }
    }
}

// query, out [rows, kv_heads, group, dim]; keys, values [slots, slot_length, kv_heads, dim], slot_length and dim
// multiples of 16; lengths [rows], the newest position included; scores [group, slot_length], scratch
void attend(const uint16_t *query, const uint16_t *keys, const uint16_t *values, uint16_t *out, const int32_t *lengths,
            float *scores, int64_t num_rows, int64_t slot_length, int64_t kv_heads, int64_t group, int64_t dim,
            int64_t window, float scale) {
#define ROWS(G, C) rows(query, keys, values, out, lengths, scores, num_rows, slot_length, kv_heads, window, scale, G, C)
#define CASE(G) case G: if (dim == 64) ROWS(G, 4); else if (dim == 128) ROWS(G, 8); else ROWS(G, dim / LANES); break;
    switch (group) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(7) CASE(8) default: ROWS(group, dim / LANES); }
}

// out = bfloat16(x / root mean square of x) * weight; x, out [rows, size]; weight [size]; size is a multiple of 16
void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t num_rows, int64_t size, float epsilon) {
    for (int64_t row = 0; row < num_rows; row++, x += size, out += size) {
        vec squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const vec y = widen(x + i);
            squares += y * y;
        }
        const float scale = 1.0f / sqrtf(sum(squares) / size + epsilon);
        for (int64_t i = 0; i < size; i += LANES) {
            narrow(out + i, widen(x + i) * scale);
            narrow(out + i, widen(out + i) * widen(weight + i));
        }
    }
}
