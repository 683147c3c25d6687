/* The CPU kernels of a stage: one Llama block per call (`block`), and the read-out (`readout`).
 *
 * Plain C with clang's vector extensions; nothing is included and nothing outside this file is called. `kernels.py`
 * puts the model's numbers and the weights' types in front of this text, and defines ENTRY_BLOCK or ENTRY_READOUT:
 *
 *   DIM (D), HEADS (H), KV_HEADS (KV), HEAD_DIM (Hd), FFN (F), VOCAB (V), EPS; D, F and Hd are multiples of 16.
 *   Q_T, K_T, V_T, O_T, GATE_T, UP_T, DOWN_T, OUT_T: f32, f16 or bf16, the type of that weight in memory.
 *
 * Every weight is row-major (out, in). A call computes `rows` rows, each one position of one sequence.
 *
 * ONE ORDER. Each dot product is summed by one 16-wide accumulator in ascending order, then by the one tree in `sum4`.
 * Which rows are computed together changes only what stays in registers, so a row's bits do not depend on its company,
 * and a prompt's not on how it is cut into chunks. Keep this when changing anything here: tests compare bytes.
 *
 * tinygrad's loader enters at the first byte of the code, so the entry must be the first function here that emits any;
 * what it calls is declared before it and defined after it.
 */

#pragma STDC FP_CONTRACT ON

typedef float f32;
typedef __fp16 f16;
typedef unsigned short bf16;

typedef float v4 __attribute__((ext_vector_type(4)));
typedef float v8 __attribute__((ext_vector_type(8)));
typedef float v16 __attribute__((ext_vector_type(16)));
typedef int i16 __attribute__((ext_vector_type(16)));
typedef unsigned int u16 __attribute__((ext_vector_type(16)));
typedef float f32x4 __attribute__((ext_vector_type(4), aligned(4))); /* as stored: aligned to the element alone */
typedef float f32x16 __attribute__((ext_vector_type(16), aligned(4)));
typedef __fp16 f16x16 __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned short bf16x16 __attribute__((ext_vector_type(16), aligned(2)));

#define OVERLOAD static __attribute__((overloadable))
#define INLINE static inline __attribute__((overloadable, always_inline))
#define NO_UNROLL _Pragma("clang loop unroll(disable)")
#define UNROLL _Pragma("clang loop unroll(full)")

static void rms_norm(float *out, const float *x, const float *weight, long rows);
OVERLOAD void matmul(float *out, const float *x, const f32 *w, long rows, long n_out, long n_in);
OVERLOAD void matmul(float *out, const float *x, const f16 *w, long rows, long n_out, long n_in);
OVERLOAD void matmul(float *out, const float *x, const bf16 *w, long rows, long n_out, long n_in);

#ifdef ENTRY_READOUT

/* logits (rows, V) = rms_norm(x (rows, D)) @ w (V, D) transposed; scratch holds rows * D floats. */
void readout(float *restrict logits, float *restrict scratch, const float *restrict x, const float *restrict norm,
             const OUT_T *restrict w, long rows) {
  rms_norm(scratch, x, norm, rows);
  matmul(logits, scratch, w, rows, VOCAB, DIM);
}

#endif
#ifdef ENTRY_BLOCK

#define Q_DIM (HEADS * HEAD_DIM)
#define KV_DIM (KV_HEADS * HEAD_DIM)

static void rotate(float *x, long heads, const float *table);
static void copy(float *to, const float *from, long n);
static void attend(float *out, float *scores, const float *q, const float *keys, const float *values, long length,
                   long stride);
static void silu_mul(float *gate, const float *up, long n);
static void add(float *x, const float *y, long n);

/* x (rows, D) becomes the block's output, in place. Row r is position positions[r] of the sequence in slot slots[r].
 * Its key and value are written to the caches (slots, context, KV, Hd) before any row attends, so rows of one sequence
 * may follow each other in one call. table (context, Hd): the cosines of the Hd/2 angles, then their sines.
 * scratch: see `_scratch_floats`. */
void block(float *restrict x, float *restrict scratch, const int *restrict slots, const int *restrict positions,
           const float *restrict table, float *restrict keys, float *restrict values, const float *restrict attn_norm,
           const Q_T *restrict wq, const K_T *restrict wk, const V_T *restrict wv, const O_T *restrict wo,
           const float *restrict ffn_norm, const GATE_T *restrict w_gate, const UP_T *restrict w_up,
           const DOWN_T *restrict w_down, long rows, long context) {
  float *normed = scratch, *y = normed + rows * DIM; /* (rows, D) each */
  float *q = y + rows * DIM, *k = q + rows * Q_DIM, *v = k + rows * KV_DIM, *o = v + rows * KV_DIM;
  float *gate = o + rows * Q_DIM, *up = gate + rows * FFN, *scores = up + rows * FFN; /* scores: (H, stride) */
  long stride = (context + 15) / 16 * 16;

  rms_norm(normed, x, attn_norm, rows);
  matmul(q, normed, wq, rows, Q_DIM, DIM);
  matmul(k, normed, wk, rows, KV_DIM, DIM);
  matmul(v, normed, wv, rows, KV_DIM, DIM);
  for (long r = 0; r < rows; r++) {
    const float *angles = table + (long)positions[r] * HEAD_DIM;
    long at = (slots[r] * context + positions[r]) * KV_DIM;
    rotate(q + r * Q_DIM, HEADS, angles);
    rotate(k + r * KV_DIM, KV_HEADS, angles);
    copy(keys + at, k + r * KV_DIM, KV_DIM);
    copy(values + at, v + r * KV_DIM, KV_DIM);
  }
  for (long r = 0; r < rows; r++) {
    long slot = slots[r] * context * KV_DIM;
    attend(o + r * Q_DIM, scores, q + r * Q_DIM, keys + slot, values + slot, positions[r] + 1, stride);
  }
  matmul(y, o, wo, rows, DIM, Q_DIM);
  add(x, y, rows * DIM);

  rms_norm(normed, x, ffn_norm, rows);
  matmul(gate, normed, w_gate, rows, FFN, DIM);
  matmul(up, normed, w_up, rows, FFN, DIM);
  silu_mul(gate, up, rows * FFN);
  matmul(y, gate, w_down, rows, DIM, FFN);
  add(x, y, rows * DIM);
}

#endif

/* ---- vectors ---- */

static inline v16 zero(void) { return (v16)(0.0f); }
static inline void store(float *p, v16 v) { *(f32x16 *)p = v; }
OVERLOAD inline v16 load(const f32 *p) { return *(const f32x16 *)p; }
OVERLOAD inline v16 load(const f16 *p) { return __builtin_convertvector(*(const f16x16 *)p, v16); }
OVERLOAD inline v16 load(const bf16 *p) {
  return __builtin_bit_cast(v16, __builtin_convertvector(*(const bf16x16 *)p, u16) << 16);
}

/* The sums of four accumulators, all by one tree: halves, quarters, then (0 + 2) + (1 + 3). */
static inline v4 sum4(v16 a, v16 b, v16 c, v16 d) {
#define PAIR(p, q, ...) __builtin_shufflevector(p, q, __VA_ARGS__)
  v16 ab = PAIR(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIR(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  v16 cd = PAIR(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIR(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  v16 quarters = PAIR(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                 PAIR(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  v8 pairs = PAIR(quarters, quarters, 0, 1, 4, 5, 8, 9, 12, 13) + PAIR(quarters, quarters, 2, 3, 6, 7, 10, 11, 14, 15);
  return pairs.even + pairs.odd;
#undef PAIR
}
static inline float sum(v16 a) { return sum4(a, zero(), zero(), zero()).x; }

/* e^x within 4e-7 relative for -86 <= x <= 88; 0 below, e^88 above. x = n ln 2 + f: a polynomial for e^f, and n is
 * added to the exponent. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the float. */
static inline v16 exp16(v16 x) {
  const float round = 12582912.0f;
  i16 below = x < -86.0f;
  x = x < -86.0f ? (v16)(-86.0f) : x;
  x = x > 88.0f ? (v16)(88.0f) : x;
  v16 shifted = x * 1.44269504f + round;
  v16 n = shifted - round;
  v16 f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  v16 high = 0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f));
  v16 p = 1.0f + f * (1.0f + f * (0.5f + f * high));
  i16 bits = __builtin_bit_cast(i16, p) + (__builtin_bit_cast(i16, shifted) << 23);
  return __builtin_bit_cast(v16, bits & ~below);
}

/* ---- the one matrix product: out (rows, n_out) = x (rows, n_in) @ w (n_out, n_in) transposed ---- */

#ifdef __AVX512F__
#define TILE_ROWS 6 /* 24 accumulators, 4 weights and one x in 32 registers */
#else
#define TILE_ROWS 1 /* 4 accumulators of 2 or 4 registers each */
#endif
#define PANEL 48 /* rows of x that stay in the second-level cache while all of w passes; a multiple of TILE_ROWS */

/* One row of x. The weights are read once, from memory, one row after the other: one stream is what the prefetcher
 * follows (four rows side by side: half the speed). Groups of four outputs share the last additions alone. */
#define DEFINE_ONE_ROW(T)                                                                                              \
  OVERLOAD inline void one_row(float *out, const float *x, const T *w, long n_in) {                                    \
    v16 acc[4];                                                                                                        \
    UNROLL for (int k = 0; k < 4; k++) {                                                                               \
      acc[k] = zero();                                                                                                 \
      for (long i = 0; i < n_in; i += 16) acc[k] += load(w + k * n_in + i) * load(x + i);                              \
    }                                                                                                                  \
    *(f32x4 *)out = sum4(acc[0], acc[1], acc[2], acc[3]);                                                              \
  }

/* N rows of x against four rows of w: 4 N accumulators stay in registers, what is loaded is used N or 4 times. `ahead`:
 * also ask for the next four rows of w, which the hardware does not foresee among four streams. */
#define DEFINE_TILE(T, N)                                                                                              \
  INLINE void tile##N(float *out, long n_out, const float *x, const T *w, long n_in, int ahead) {                      \
    v16 acc[N][4], wv[4];                                                                                              \
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int k = 0; k < 4; k++) acc[n][k] = zero();                          \
    NO_UNROLL for (long i = 0; i < n_in; i += 16) { /* unrolled further it is slower */                                \
      if (ahead) UNROLL for (unsigned long byte = 0; byte < 64 * sizeof(T); byte += 64)                                \
        __builtin_prefetch((const char *)(w + 4 * n_in + 4 * i) + byte);                                               \
      UNROLL for (int k = 0; k < 4; k++) wv[k] = load(w + k * n_in + i);                                               \
      UNROLL for (int n = 0; n < N; n++) {                                                                             \
        v16 xv = load(x + n * n_in + i);                                                                               \
        UNROLL for (int k = 0; k < 4; k++) acc[n][k] += wv[k] * xv;                                                    \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int n = 0; n < N; n++)                                                                                 \
      *(f32x4 *)(out + n * n_out) = sum4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);                                  \
  }

#define TILE(N)                                                      \
  case N:                                                            \
    if (r == first) tile##N(to, n_out, from, wo, n_in, 1);           \
    else tile##N(to, n_out, from, wo, n_in, 0);                      \
    break;

/* Any number of rows. n_out >= 4; where it is no multiple of four, the last group starts earlier and computes some
 * outputs twice. */
#define DEFINE_MATMUL(T)                                                                                               \
  DEFINE_ONE_ROW(T)                                                                                                    \
  DEFINE_TILE(T, 1) DEFINE_TILE(T, 2) DEFINE_TILE(T, 3) DEFINE_TILE(T, 4) DEFINE_TILE(T, 5) DEFINE_TILE(T, 6)          \
  OVERLOAD void matmul(float *out, const float *x, const T *w, long rows, long n_out, long n_in) {                     \
    for (long first = 0; first < rows; first += PANEL) {                                                               \
      long last = first + PANEL < rows ? first + PANEL : rows;                                                         \
      for (long group = 0; group < n_out; group += 4) {                                                                \
        long o = group + 4 <= n_out ? group : n_out - 4;                                                               \
        const T *wo = w + o * n_in;                                                                                    \
        if (rows == 1) { one_row(out + o, x, wo, n_in); continue; }                                                    \
        for (long r = first; r < last; r += TILE_ROWS) {                                                               \
          float *to = out + r * n_out + o;                                                                             \
          const float *from = x + r * n_in;                                                                            \
          long n = last - r < TILE_ROWS ? last - r : TILE_ROWS;                                                        \
          switch (n) { TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1) }                                               \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }

DEFINE_MATMUL(f32)
DEFINE_MATMUL(f16)
DEFINE_MATMUL(bf16)

/* out = x / sqrt(mean(x^2) + eps) * weight, for each row of D. */
static void rms_norm(float *out, const float *x, const float *weight, long rows) {
  for (; rows > 0; rows--, x += DIM, out += DIM) {
    v16 squares = zero();
    for (long i = 0; i < DIM; i += 16) squares += load(x + i) * load(x + i);
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / DIM + EPS);
    for (long i = 0; i < DIM; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
  }
}

#ifdef ENTRY_BLOCK

static void copy(float *to, const float *from, long n) {
  for (long i = 0; i < n; i += 16) store(to + i, load(from + i));
}

static void add(float *x, const float *y, long n) {
  for (long i = 0; i < n; i += 16) store(x + i, load(x + i) + load(y + i));
}

static void silu_mul(float *gate, const float *up, long n) {
  for (long i = 0; i < n; i += 16) {
    v16 g = load(gate + i);
    store(gate + i, g / (1.0f + exp16(-g)) * load(up + i));
  }
}

/* RoPE in the half-split layout: dimension i turns with dimension i + Hd/2. */
static void rotate(float *x, long heads, const float *table) {
  for (; heads > 0; heads--, x += HEAD_DIM)
    for (int i = 0; i < HEAD_DIM / 2; i++) {
      float a = x[i], b = x[i + HEAD_DIM / 2], cosine = table[i], sine = table[i + HEAD_DIM / 2];
      x[i] = a * cosine - b * sine;
      x[i + HEAD_DIM / 2] = b * cosine + a * sine;
    }
}

/* Replaces scores by e^(score - max), returns their sum. Positions from `length` on count as nothing. */
static float softmax_numerators(float *scores, long length) {
  long end = (length + 15) / 16 * 16;
  for (long t = length; t < end; t++) scores[t] = -1e30f;
  v16 top = load(scores), total = zero();
  for (long t = 16; t < end; t += 16) { v16 s = load(scores + t); top = s > top ? s : top; }
  float max = top[0];
  for (int i = 1; i < 16; i++) max = top[i] > max ? top[i] : max;
  for (long t = 0; t < end; t += 16) { v16 e = exp16(load(scores + t) - max); store(scores + t, e); total += e; }
  return sum(total);
}

/* out (H, Hd): one position's attention over the first `length` positions of its sequence. keys and values
 * (context, KV, Hd), scores (H, stride). Keys are read in the order they lie in, four positions at a time; past the end
 * the last one repeats. */
static void attend(float *out, float *scores, const float *q, const float *keys, const float *values, long length,
                   long stride) {
  const float scale = 1.0f / __builtin_sqrtf((float)HEAD_DIM);
  for (long t = 0; t < length; t += 4) {
    const float *key[4];
    for (int j = 0; j < 4; j++) key[j] = keys + (t + j < length ? t + j : length - 1) * KV_DIM;
    for (long h = 0; h < HEADS; h++) {
      long kv = h / (HEADS / KV_HEADS) * HEAD_DIM;
      v16 acc[4] = {zero(), zero(), zero(), zero()};
      for (int i = 0; i < HEAD_DIM; i += 16) {
        v16 qv = load(q + h * HEAD_DIM + i);
        UNROLL for (int j = 0; j < 4; j++) acc[j] += qv * load(key[j] + kv + i);
      }
      *(f32x4 *)(scores + h * stride + t) = sum4(acc[0], acc[1], acc[2], acc[3]) * scale;
    }
  }
  for (long h = 0; h < HEADS; h++, scores += stride) {
    const float *value = values + h / (HEADS / KV_HEADS) * HEAD_DIM;
    float total = softmax_numerators(scores, length);
    v16 acc[HEAD_DIM / 16];
    UNROLL for (int i = 0; i < HEAD_DIM / 16; i++) acc[i] = zero();
    for (long t = 0; t < length; t++)
      UNROLL for (int i = 0; i < HEAD_DIM / 16; i++) acc[i] += scores[t] * load(value + t * KV_DIM + i * 16);
    UNROLL for (int i = 0; i < HEAD_DIM / 16; i++) store(out + h * HEAD_DIM + i * 16, acc[i] / total);
  }
}

#endif
