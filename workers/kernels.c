/* The CPU kernels of a stage: one transformer block per call (`block`), and the read-out (`readout`).
 *
 * Plain C with clang's vector extensions; nothing is included and nothing outside this file is called. `kernels.py`
 * puts the model's numbers and the weights' types in front of this text, and defines ENTRY_BLOCK or ENTRY_READOUT:
 *
 *   DIM (D), HEADS (H), KV_HEADS (KV), HEAD_DIM (Hd), FFN (F), VOCAB (V), EPS; any widths.
 *   LAYER_NORM, GELU: 1, or 0 for RMSNorm, SwiGLU.
 *   Q_T, K_T, V_T, O_T, GATE_T, UP_T, DOWN_T, OUT_T: f32, f16, bf16, q4_0, ..., the type of that weight in memory.
 *
 * Every weight is row-major (out, in). A call computes `rows` rows, each one position of one sequence. A pointer to
 * what a model does not have is NULL.
 *
 * ONE ORDER. Each dot product is summed by one 16-wide accumulator in ascending order, then by the one tree in `sum4`.
 * Which rows are computed together changes only what stays in registers, so a row's bits do not depend on its company,
 * and a prompt's not on how it is cut into chunks. Keep this when changing anything here: tests compare bytes.
 *
 * tinygrad's loader enters at the first byte of the code, so the entry must be the first function here that emits any;
 * what it calls is declared before it and defined after it.
 */

#pragma STDC FP_CONTRACT ON

typedef unsigned char u8;
typedef signed char i8;
typedef float f32;
typedef __fp16 f16;
typedef unsigned short bf16;

/* GGUF's quantised types: a block of 32 weights (the last three: 256) of a row. `widen` says what the bits mean. */
typedef struct { f16 d; u8 q[16]; } q4_0;
typedef struct { f16 d, m; u8 q[16]; } q4_1;
typedef struct { f16 d; u8 high[4], q[16]; } q5_0;
typedef struct { f16 d, m; u8 high[4], q[16]; } q5_1;
typedef struct { f16 d; i8 q[32]; } q8_0;
typedef struct { f16 d, m; u8 scales[12], q[128]; } q4_k;
typedef struct { f16 d, m; u8 scales[12], high[32], q[128]; } q5_k;
typedef struct { u8 q[128], high[64]; i8 scales[16]; f16 d; } q6_k;

#define EACH_FLOAT(DO) DO(f32) DO(f16) DO(bf16)
#define EACH_OF_32(DO) DO(q4_0, 32) DO(q4_1, 32) DO(q5_0, 32) DO(q5_1, 32) DO(q8_0, 32)
#define EACH_OF_256(DO) DO(q4_k, 256) DO(q5_k, 256) DO(q6_k, 256)
#define EACH_QUANTISED(DO) EACH_OF_32(DO) EACH_OF_256(DO)

typedef float v4 __attribute__((ext_vector_type(4)));
typedef float v8 __attribute__((ext_vector_type(8)));
typedef float v16 __attribute__((ext_vector_type(16)));
typedef int i16 __attribute__((ext_vector_type(16)));
typedef unsigned int u16 __attribute__((ext_vector_type(16)));
typedef float f32x4 __attribute__((ext_vector_type(4), aligned(4))); /* as stored: aligned to the element alone */
typedef float f32x16 __attribute__((ext_vector_type(16), aligned(4)));
typedef __fp16 f16x16 __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned short bf16x16 __attribute__((ext_vector_type(16), aligned(2)));
typedef u8 u8x16 __attribute__((ext_vector_type(16), aligned(1)));
typedef i8 i8x16 __attribute__((ext_vector_type(16), aligned(1)));

#define OVERLOAD static __attribute__((overloadable))
#define INLINE static inline __attribute__((overloadable, always_inline))
#define NO_UNROLL _Pragma("clang loop unroll(disable)")
#define UNROLL _Pragma("clang loop unroll(full)")

#define TENSOR(T) struct { const T *weight; const float *bias; }
typedef TENSOR(float) Norm;

/* out (rows, n_out) = x (rows, n_in) @ w (n_out, n_in) transposed + bias (n_out), which may be NULL.
 * wide: room for 4 * n_in floats, where w is quantised. */
#define LINEAR(T)                                                                                                      \
  OVERLOAD void linear(float *out, const float *x, const T *w, const float *bias, float *wide, long rows, long n_out,  \
                       long n_in)
#define DECLARE_LINEAR(T, ...) LINEAR(T);
EACH_FLOAT(DECLARE_LINEAR)
EACH_QUANTISED(DECLARE_LINEAR)
static void norm(float *out, const float *x, Norm w, long rows);
static void add(float *x, const float *y, long n);

#ifdef ENTRY_READOUT

/* logits (rows, V) = norm(x (rows, D)) @ w (V, D) transposed. scratch: rows * D floats, then `wide` of linear. */
void readout(float *restrict logits, float *restrict scratch, const float *restrict x, const float *restrict weight,
             const float *restrict bias, const OUT_T *restrict w, long rows) {
  norm(scratch, x, (Norm){weight, bias}, rows);
  linear(logits, scratch, w, 0, scratch + rows * DIM, rows, VOCAB, DIM);
}

#endif
#ifdef ENTRY_BLOCK

#define Q_DIM (HEADS * HEAD_DIM)
#define KV_DIM (KV_HEADS * HEAD_DIM)

typedef struct { /* `BLOCK_TENSORS` in kernels.py has the same order */
  Norm attn_norm;
  TENSOR(Q_T) q;
  TENSOR(K_T) k;
  TENSOR(V_T) v;
  Norm q_norm, k_norm; /* (Hd), of each head */
  TENSOR(O_T) o;
  Norm ffn_norm;
  TENSOR(GATE_T) gate; /* SwiGLU's alone */
  TENSOR(UP_T) up;
  TENSOR(DOWN_T) down;
} Weights;

static void place(float *x, long heads, const float *weight, const float *angles);
static void copy(float *to, const float *from, long n);
static void attend(float *out, float *scores, const float *q, const float *keys, const float *values, long length,
                   long stride);
static void silu_mul(float *gate, const float *up, long n);
static void gelu(float *x, long n);

/* x (rows, D) becomes the block's output, in place. Row r is position positions[r] of the sequence in slot slots[r].
 * Its key and value are written to the caches (slots, context, KV, Hd) before any row attends, so rows of one sequence
 * may follow each other in one call. It attends over `window` positions, its own the last; 0: over all before it too.
 * table (context, Hd): the cosines of the Hd/2 angles, then their sines.
 * scratch: `_scratch_floats` in kernels.py; what stands there at the end is the call's trace. */
void block(float *restrict x, float *restrict scratch, const int *restrict slots, const int *restrict positions,
           const float *restrict table, float *restrict keys, float *restrict values, const Weights *restrict w,
           long rows, long context, long window) {
  float *normed = scratch, *y = normed + rows * DIM; /* (rows, D) each */
  float *q = y + rows * DIM, *k = q + rows * Q_DIM, *v = k + rows * KV_DIM, *o = v + rows * KV_DIM;
  float *act = o + rows * Q_DIM, *up = act + rows * FFN; /* (rows, F) each */
  long stride = (context + 15) / 16 * 16;
  float *scores = up + rows * FFN, *wide = scores + HEADS * stride; /* scores: (H, stride) */

  norm(normed, x, w->attn_norm, rows);
  linear(q, normed, w->q.weight, w->q.bias, wide, rows, Q_DIM, DIM);
  linear(k, normed, w->k.weight, w->k.bias, wide, rows, KV_DIM, DIM);
  linear(v, normed, w->v.weight, w->v.bias, wide, rows, KV_DIM, DIM);
  for (long r = 0; r < rows; r++) {
    const float *angles = table ? table + (long)positions[r] * HEAD_DIM : 0;
    long at = (slots[r] * context + positions[r]) * KV_DIM;
    place(q + r * Q_DIM, HEADS, w->q_norm.weight, angles);
    place(k + r * KV_DIM, KV_HEADS, w->k_norm.weight, angles);
    copy(keys + at, k + r * KV_DIM, KV_DIM);
    copy(values + at, v + r * KV_DIM, KV_DIM);
  }
  for (long r = 0; r < rows; r++) {
    long end = positions[r] + 1, first = window && end > window ? end - window : 0;
    long from = (slots[r] * context + first) * KV_DIM;
    attend(o + r * Q_DIM, scores, q + r * Q_DIM, keys + from, values + from, end - first, stride);
  }
  linear(y, o, w->o.weight, w->o.bias, wide, rows, DIM, Q_DIM);
  add(x, y, rows * DIM);

  norm(normed, x, w->ffn_norm, rows);
  linear(GELU ? act : up, normed, w->up.weight, w->up.bias, wide, rows, FFN, DIM);
  if (GELU) {
    gelu(act, rows * FFN);
  } else {
    linear(act, normed, w->gate.weight, w->gate.bias, wide, rows, FFN, DIM);
    silu_mul(act, up, rows * FFN);
  }
  linear(y, act, w->down.weight, w->down.bias, wide, rows, DIM, FFN);
  add(x, y, rows * DIM);
}

#endif

/* ---- vectors ---- */

#define TAILS ((DIM | HEAD_DIM | FFN) % 16 != 0) /* some width is no multiple of 16 */

static inline v16 zero(void) { return (v16)(0.0f); }
INLINE v16 load(const f32 *p) { return *(const f32x16 *)p; }
INLINE v16 load(const f16 *p) { return __builtin_convertvector(*(const f16x16 *)p, v16); }
INLINE v16 load(const bf16 *p) {
  return __builtin_bit_cast(v16, __builtin_convertvector(*(const bf16x16 *)p, u16) << 16);
}
INLINE void store(float *p, v16 v) { *(f32x16 *)p = v; }

/* The same where only `left` elements remain: zeros behind them, and nothing behind them is read or written. Where
 * every width is a multiple of 16 this costs nothing. */
#define DEFINE_LOAD_TAIL(T)                                  \
  INLINE v16 load(const T *p, long left) {                   \
    if (!TAILS || left >= 16) return load(p);                \
    T all[16] = {0};                                         \
    NO_UNROLL for (long i = 0; i < left; i++) all[i] = p[i]; \
    return load(all);                                        \
  }
EACH_FLOAT(DEFINE_LOAD_TAIL)
INLINE void store(float *p, v16 v, long left) {
  if (!TAILS || left >= 16) { store(p, v); return; }
  for (int i = 0; i < 16; i++) if (i < left) p[i] = v[i];
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

/* ---- quantised weights: `widen` writes a block's as floats, bit for bit GGUF's (only the last step rounds) ---- */

INLINE v16 floats(u8x16 q) { return __builtin_convertvector(q, v16); }
INLINE v16 floats(i8x16 q) { return __builtin_convertvector(q, v16); }
INLINE u8x16 bits(const u8 *p, int shift, int mask) { return *(const u8x16 *)p >> (u8)shift & (u8)mask; }

/* 16 of the fifth bits, 0 or 16 each, which stand one after the other from bit `first` of four bytes on. */
static inline u8x16 fifth(const u8 *high, int first) {
  const u16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  unsigned word = high[0] | high[1] << 8 | high[2] << 16 | (unsigned)high[3] << 24;
  return __builtin_convertvector((word >> (lane + first) & 1) << 4, u8x16);
}

/* Number j of the eight scales and minima of a q4_k or q5_k, 6 bits each: four of either as bytes, whose upper two bits
 * belong to the other four; these have their lower bits in the last four bytes. */
static inline float scale6(const u8 *s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4; }
static inline float minimum6(const u8 *s, int j) { return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4; }

/* `b` is the block, `g` one of its groups of 16 weights; Q their integers as stored, VALUES they by these. */
#define DEFINE_WIDEN(T, GROUPS, Q, VALUES)                                                 \
  INLINE v16 values(const T *b, int g) { v16 q = floats(Q); return VALUES; }               \
  INLINE void widen(float *out, const T *b) {                                              \
    UNROLL for (int g = 0; g < GROUPS; g++) store(out + 16 * g, values(b, g));             \
  }
#define NIBBLES bits(b->q, 4 * g, 15)
#define NIBBLES_K bits(b->q + g / 4 * 32 + g % 2 * 16, g / 2 % 2 * 4, 15)
#define VALUE_K q * (b->d * scale6(b->scales, g / 2)) - b->m * minimum6(b->scales, g / 2)
#ifdef __AVX512F__ /* all sixteen values of a block, and the one that each nibble names */
#define DEFINE_WIDEN_BY_TABLE(T, VALUES)                                                    \
  INLINE v16 values(const T *b, int g) {                                                    \
    v16 q = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};                         \
    i16 nibbles = __builtin_convertvector(*(const u8x16 *)b->q, i16) >> 4 * g;              \
    return __builtin_ia32_permvarsf512(VALUES, nibbles); /* which looks at four bits */     \
  }                                                                                         \
  INLINE void widen(float *out, const T *b) { store(out, values(b, 0)); store(out + 16, values(b, 1)); }
DEFINE_WIDEN_BY_TABLE(q4_0, (q - 8.0f) * b->d)
DEFINE_WIDEN_BY_TABLE(q4_1, q * b->d + b->m)
#else
DEFINE_WIDEN(q4_0, 2, NIBBLES, (q - 8.0f) * b->d)
DEFINE_WIDEN(q4_1, 2, NIBBLES, q * b->d + b->m)
#endif
DEFINE_WIDEN(q5_0, 2, NIBBLES | fifth(b->high, 16 * g), (q - 16.0f) * b->d)
DEFINE_WIDEN(q5_1, 2, NIBBLES | fifth(b->high, 16 * g), q * b->d + b->m)
DEFINE_WIDEN(q8_0, 2, *(const i8x16 *)(b->q + 16 * g), q * b->d)
DEFINE_WIDEN(q4_k, 16, NIBBLES_K, VALUE_K)
DEFINE_WIDEN(q5_k, 16, NIBBLES_K | bits(b->high + g % 2 * 16, g / 2, 1) << 4, VALUE_K)
DEFINE_WIDEN(q6_k, 16, bits(b->q + g / 8 * 64 + g % 4 * 16, g % 8 / 4 * 4, 15)
                       | bits(b->high + g / 8 * 32 + g % 2 * 16, g / 2 % 4 * 2, 3) << 4,
             (q - 32.0f) * (b->d * (float)b->scales[g]))

/* `count` rows of w, from row o on, as what the product reads: themselves, or floats in `wide`. */
#define DEFINE_ROWS(T) \
  INLINE const T *rows_of(const T *w, long o, long count, long n_in, float *wide) { return w + o * n_in; }
#define DEFINE_WIDENED_ROWS(T, WEIGHTS)                                                   \
  INLINE const f32 *rows_of(const T *w, long o, long count, long n_in, float *wide) {     \
    w += o * n_in / WEIGHTS;                                                              \
    NO_UNROLL for (long i = 0; i < count * n_in; i += WEIGHTS) widen(wide + i, w++);      \
    return wide;                                                                          \
  }
EACH_FLOAT(DEFINE_ROWS)
EACH_QUANTISED(DEFINE_WIDENED_ROWS)

/* ---- the one matrix product, see `linear` ---- */

#ifdef __AVX512F__
#define TILE_ROWS 6 /* 24 accumulators, 4 weights and one x in 32 registers */
#else
#define TILE_ROWS 1 /* 4 accumulators of 2 or 4 registers each */
#endif
#define AHEAD 12 /* rows of w */
#define PANEL 48 /* rows of x that stay in the second-level cache while all of w passes; a multiple of TILE_ROWS */

/* One row of x. The weights are read once, from memory, one row after the other: one stream is what the prefetcher
 * follows (four rows side by side: half the speed). Groups of four outputs share the last additions alone. */
#define ONE_ROW(T) OVERLOAD inline void one_row(float *out, const float *x, const T *w, float *wide, long o, long n_in)
#define DEFINE_ONE_ROW(T)                                                                                              \
  INLINE v16 products(const float *x, const T *w, long n_in) {                                                         \
    v16 acc = zero();                                                                                                  \
    for (long i = 0; i < n_in; i += 16) acc += load(w + i, n_in - i) * load(x + i, n_in - i);                          \
    return acc;                                                                                                        \
  }                                                                                                                    \
  ONE_ROW(T) {                                                                                                         \
    v16 acc[4];                                                                                                        \
    UNROLL for (int k = 0; k < 4; k++) acc[k] = products(x, w + (o + k) * n_in, n_in);                                 \
    *(f32x4 *)out = sum4(acc[0], acc[1], acc[2], acc[3]);                                                              \
  }

/* The same of small blocks, widened in registers: here computing is what takes the time, so four rows go side by side.
 * Larger blocks are widened into memory first. */
#define DEFINE_ONE_ROW_OF_32(T, WEIGHTS)                                                                               \
  ONE_ROW(T) {                                                                                                         \
    long blocks = n_in / WEIGHTS;                                                                                      \
    const T *b = w + o * blocks;                                                                                       \
    v16 acc[4] = {zero(), zero(), zero(), zero()};                                                                     \
    NO_UNROLL for (long i = 0; i < blocks; i++, b++) {                                                                 \
      for (unsigned long byte = 0; byte < 4 * sizeof(T); byte += 64)                                                   \
        __builtin_prefetch((const char *)(b + AHEAD * blocks + 3 * i) + byte, 0, 2);                                   \
      UNROLL for (int g = 0; g < WEIGHTS / 16; g++) {                                                                  \
        v16 xv = load(x + WEIGHTS * i + 16 * g);                                                                       \
        UNROLL for (int k = 0; k < 4; k++) acc[k] += values(b + k * blocks, g) * xv;                                   \
      }                                                                                                                \
    }                                                                                                                  \
    *(f32x4 *)out = sum4(acc[0], acc[1], acc[2], acc[3]);                                                              \
  }
#define DEFINE_ONE_ROW_OF_256(T, WEIGHTS)                                                                              \
  ONE_ROW(T) { one_row(out, x, rows_of(w, o, 4, n_in, wide), wide, 0, n_in); }

/* N rows of x against four rows of w: 4 N accumulators stay in registers, what is loaded is used N or 4 times. `ahead`:
 * also ask for rows of w that come later, which the hardware does not foresee among four streams; into the second-level
 * cache, as the first has too few misses under way to keep up with the memory. */
#define DEFINE_TILE(T, N)                                                                                              \
  INLINE void tile##N(float *out, long n_out, const float *x, const T *w, long n_in, int ahead) {                      \
    v16 acc[N][4], wv[4];                                                                                              \
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int k = 0; k < 4; k++) acc[n][k] = zero();                          \
    NO_UNROLL for (long i = 0; i < n_in; i += 16) { /* unrolled further it is slower */                                \
      if (ahead) UNROLL for (unsigned long byte = 0; byte < 64 * sizeof(T); byte += 64)                                \
        __builtin_prefetch((const char *)(w + AHEAD * n_in + 4 * i) + byte, 0, 2);                                     \
      UNROLL for (int k = 0; k < 4; k++) wv[k] = load(w + k * n_in + i, n_in - i);                                     \
      UNROLL for (int n = 0; n < N; n++) {                                                                             \
        v16 xv = load(x + n * n_in + i, n_in - i);                                                                     \
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

#define DEFINE_PRODUCT(T)                                                                                              \
  DEFINE_ONE_ROW(T)                                                                                                    \
  DEFINE_TILE(T, 1) DEFINE_TILE(T, 2) DEFINE_TILE(T, 3) DEFINE_TILE(T, 4) DEFINE_TILE(T, 5) DEFINE_TILE(T, 6)
EACH_FLOAT(DEFINE_PRODUCT)
EACH_OF_32(DEFINE_ONE_ROW_OF_32)
EACH_OF_256(DEFINE_ONE_ROW_OF_256)

/* Any number of rows. Outputs come in fours; where n_out is no multiple of four, the last group starts earlier and
 * computes some outputs twice. Fewer than four in all come one by one. */
#define DEFINE_LINEAR(T, ...)                                                                                          \
  LINEAR(T) {                                                                                                          \
    long count = n_out < 4 ? 1 : 4;                                                                                    \
    for (long first = 0; first < rows; first += PANEL) {                                                               \
      long last = first + PANEL < rows ? first + PANEL : rows;                                                         \
      long tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS, even = (last - first + tiles - 1) / tiles;              \
      for (long group = 0; group < n_out; group += count) {                                                            \
        long o = group + count <= n_out ? group : n_out - count;                                                       \
        if (rows == 1 && count == 4) { one_row(out + o, x, w, wide, o, n_in); continue; }                              \
        __auto_type wo = rows_of(w, o, count, n_in, wide);                                                             \
        if (count == 1) {                                                                                              \
          for (long r = first; r < last; r++) out[r * n_out + o] = sum(products(x + r * n_in, wo, n_in));              \
          continue;                                                                                                    \
        }                                                                                                              \
        for (long r = first; r < last; r += even) {                                                                    \
          float *to = out + r * n_out + o;                                                                             \
          const float *from = x + r * n_in;                                                                            \
          long n = last - r < even ? last - r : even;                                                                  \
          switch (n) { TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1) }                                               \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    if (bias) for (long r = 0; r < rows; r++) add(out + r * n_out, bias, n_out);                                       \
  }
EACH_FLOAT(DEFINE_LINEAR)
EACH_QUANTISED(DEFINE_LINEAR)

/* ---- norms and the rest of a block ---- */

static void add(float *x, const float *y, long n) {
  for (long i = 0; i < n; i += 16) store(x + i, load(x + i, n - i) + load(y + i, n - i), n - i);
}

/* RMSNorm of one row of n: out = x / sqrt(mean(x^2) + eps) * weight. out may be x. */
static void rms_norm(float *out, const float *x, const float *weight, long n) {
  v16 squares = zero();
  for (long i = 0; i < n; i += 16) squares += load(x + i, n - i) * load(x + i, n - i);
  float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + EPS);
  for (long i = 0; i < n; i += 16) store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
}

/* RMSNorm of each row of D; LayerNorm is that of the row less its mean. Then the bias. */
static void norm(float *out, const float *x, Norm w, long rows) {
  for (; rows > 0; rows--, x += DIM, out += DIM) {
    if (LAYER_NORM) {
      v16 total = zero();
      for (long i = 0; i < DIM; i += 16) total += load(x + i, DIM - i);
      float mean = sum(total) / DIM;
      for (long i = 0; i < DIM; i += 16) store(out + i, load(x + i, DIM - i) - mean, DIM - i);
    }
    rms_norm(out, LAYER_NORM ? out : x, w.weight, DIM);
    if (w.bias) add(out, w.bias, DIM);
  }
}

#ifdef ENTRY_BLOCK

static void copy(float *to, const float *from, long n) {
  for (long i = 0; i < n; i += 16) store(to + i, load(from + i, n - i), n - i);
}

static void silu_mul(float *gate, const float *up, long n) {
  for (long i = 0; i < n; i += 16) {
    v16 g = load(gate + i, n - i);
    store(gate + i, g / (1.0f + exp16(-g)) * load(up + i, n - i), n - i);
  }
}

/* GELU in its tanh form: x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static inline v16 gelu16(v16 x) { return x / (1.0f + exp16(-1.59576912f * (x + 0.044715f * x * x * x))); }

static void gelu(float *x, long n) {
  for (long i = 0; i < n; i += 16) store(x + i, gelu16(load(x + i, n - i)), n - i);
}

/* Queries or keys (heads, Hd): RMSNorm of each head by `weight` and RoPE by `angles`, where the model has them. RoPE is
 * in the half-split layout: dimension i turns with dimension i + Hd/2. */
static void place(float *x, long heads, const float *weight, const float *angles) {
  for (; heads > 0; heads--, x += HEAD_DIM) {
    if (weight) rms_norm(x, x, weight, HEAD_DIM);
    if (angles) for (int i = 0; i < HEAD_DIM / 2; i++) {
      float a = x[i], b = x[i + HEAD_DIM / 2], cosine = angles[i], sine = angles[i + HEAD_DIM / 2];
      x[i] = a * cosine - b * sine;
      x[i + HEAD_DIM / 2] = b * cosine + a * sine;
    }
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

#define PIECES ((HEAD_DIM + 15) / 16) /* vectors that hold a head */

/* out (H, Hd): one position's attention over `length` positions of its sequence. keys and values (length, KV, Hd) start
 * at the first of them; scores (H, stride). Keys are read in the order they lie in, four positions at a time; past the
 * end the last one repeats. */
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
        v16 qv = load(q + h * HEAD_DIM + i, HEAD_DIM - i);
        UNROLL for (int j = 0; j < 4; j++) acc[j] += qv * load(key[j] + kv + i, HEAD_DIM - i);
      }
      *(f32x4 *)(scores + h * stride + t) = sum4(acc[0], acc[1], acc[2], acc[3]) * scale;
    }
  }
  for (long h = 0; h < HEADS; h++, scores += stride) {
    const float *value = values + h / (HEADS / KV_HEADS) * HEAD_DIM;
    float total = softmax_numerators(scores, length);
    v16 acc[PIECES];
    UNROLL for (int i = 0; i < PIECES; i++) acc[i] = zero();
    for (long t = 0; t < length; t++)
      UNROLL for (int i = 0; i < PIECES; i++)
        acc[i] += scores[t] * load(value + t * KV_DIM + i * 16, HEAD_DIM - i * 16);
    UNROLL for (int i = 0; i < PIECES; i++) store(out + h * HEAD_DIM + i * 16, acc[i] / total, HEAD_DIM - i * 16);
  }
}

#endif
