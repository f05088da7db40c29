// Decode attention and RMSNorm on a CPU, one pass over memory each, and a whole decode step in one call, with the matmuls of
// matmul_fp32.cpp: for a small model, calling operations from Python takes as long as computing them.
//
// Scores of one key per SIMD lane; bfloat16 dot products with AVX-512 BF16.
// Threads are those of the OpenMP runtime that torch has loaded.
//
// decode.py defines NUMBER (float or bf16) and WIDTH (head width).

#include "vectors.h"

namespace {

constexpr int VECTORS = WIDTH / LANES;
constexpr int CHUNK = 512;  // keys per block of scores

// Queries, and vectors of a value, whose sums are held in registers at once.
#ifdef WIDE
constexpr int at_once(int vectors) { return vectors <= 4 ? 5 : vectors <= 8 ? 2 : 1; }
constexpr int across(int vectors, int) { return vectors; }
#else
constexpr int at_once(int) { return 5; }
constexpr int across(int vectors, int queries) {
    int most = queries > 2 ? 2 : queries > 1 ? 4 : 8;
    while (vectors % most) most /= 2;
    return most;
}
#endif

#ifdef PAIRS
// bfloat16 heads of whole registers: 32 products per instruction, sums in float32.
template <class T, int VD>
constexpr bool in_pairs = sizeof(T) == 2 && VD % 2 == 0;
#else
template <class T, int VD>
constexpr bool in_pairs = false;
#endif

// Dot products of one query with keys; their sums over the lanes are its scores.
template <class T, int VD, bool PAIRED = in_pairs<T, VD>>
struct Query {
    Floats part[VD];
    explicit Query(const float* q) {
        UNROLLED
        for (int d = 0; d < VD; d++) part[d] = load(q + LANES * d);
    }
    Floats with(const T* key) const {
        Floats s = part[0] * load(key);
        for (int d = 1; d < VD; d++) s += part[d] * load(key + LANES * d);
        return s;
    }
};

#ifdef PAIRS
template <class T, int VD>
struct Query<T, VD, true> {
    __m512bh part[VD / 2];
    explicit Query(const float* q) {
        UNROLLED
        for (int d = 0; d < VD / 2; d++)
            part[d] = _mm512_cvtne2ps_pbh((__m512)load(q + 32 * d + 16), (__m512)load(q + 32 * d));
    }
    Floats with(const T* key) const {
        __m512 s = _mm512_setzero_ps();
        UNROLLED
        for (int d = 0; d < VD / 2; d++)
            s = _mm512_dpbf16_ps(s, part[d], (__m512bh)_mm512_loadu_si512(key + 32 * d));
        return (Floats)s;
    }
};
#endif

// Online softmax of RQ queries: maximum score, sum of weights, and weighted sum of values.
template <int VD, int RQ>
struct Attended {
    float top[RQ], total[RQ];
    float values[RQ][VD * LANES];
    Attended() {
        UNROLLED
        for (int q = 0; q < RQ; q++) top[q] = NOTHING, total[q] = 0;
        std::memset(values, 0, sizeof values);
    }
};

template <class T, int VD, int RQ>
void scores_of(const float* query, const T* keys, int count, float scale, float scores[RQ][CHUNK]) {
    constexpr int D = VD * LANES;
    const int whole = count / LANES * LANES;
    UNROLLED
    for (int q = 0; q < RQ; q++) {
        const Query<T, VD> mine(query + q * D);
        for (int k = 0; k < whole; k += LANES) {
            Floats products[LANES];
            UNROLLED
            for (int i = 0; i < LANES; i++) products[i] = mine.with(keys + (int64_t)(k + i) * D);
            store(scores[q] + k, sums(products) * scale);
        }
        if (whole < count) {
            store(scores[q] + whole, all(NOTHING));
            for (int k = whole; k < count; k++) scores[q][k] = sum(mine.with(keys + (int64_t)k * D)) * scale;
        }
    }
}

// Add the values of `here` keys, weighted by `scores`, which are zero-padded to a whole vector.
template <class T, int VD, int RQ>
void add_values(const T* value, int here, const float* kept, const float scores[RQ][CHUNK], Attended<VD, RQ>& seen) {
    constexpr int D = VD * LANES;
#ifdef PAIRS
    if constexpr (in_pairs<T, VD>) {
        Floats sum[RQ][VD];
        UNROLLED
        for (int q = 0; q < RQ; q++)
            UNROLLED
            for (int d = 0; d < VD; d++) sum[q][d] = load(seen.values[q] + LANES * d) * kept[q];
        // two keys at a time: their values are interleaved by 16 bits, so the sums are permuted; `write` restores the order
        uint32_t weights[RQ][CHUNK / 2];
        UNROLLED
        for (int q = 0; q < RQ; q++)
            for (int k = 0; k < here; k += LANES) store((bf16*)weights[q] + k, load(scores[q] + k));
        for (int k = 0; k < here; k += 2) {
            const T* first = value + (int64_t)k * D;
            const T* second = k + 1 < here ? first + D : first;  // its weight is 0
            __m512bh v[VD];
            UNROLLED
            for (int d = 0; d < VD; d += 2) {
                const __m512i a = _mm512_loadu_si512(first + LANES * d), b = _mm512_loadu_si512(second + LANES * d);
                v[d] = (__m512bh)_mm512_unpacklo_epi16(a, b);
                v[d + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
            }
            UNROLLED
            for (int q = 0; q < RQ; q++) {
                const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[q][k / 2]);
                UNROLLED
                for (int d = 0; d < VD; d++) sum[q][d] = (Floats)_mm512_dpbf16_ps((__m512)sum[q][d], v[d], weight);
            }
        }
        UNROLLED
        for (int q = 0; q < RQ; q++)
            UNROLLED
            for (int d = 0; d < VD; d++) store(seen.values[q] + LANES * d, sum[q][d]);
        return;
    }
#endif
    constexpr int BROAD = across(VD, RQ);  // vectors of a value at a time, so that the sums of all queries stay in registers
    UNROLLED
    for (int from = 0; from < VD; from += BROAD) {
        Floats sum[RQ][BROAD];
        UNROLLED
        for (int q = 0; q < RQ; q++)
            UNROLLED
            for (int d = 0; d < BROAD; d++) sum[q][d] = load(seen.values[q] + LANES * (from + d)) * kept[q];
        for (int k = 0; k < here; k++) {
            const T* mine = value + (int64_t)k * D + LANES * from;
            Floats v[BROAD];
            UNROLLED
            for (int d = 0; d < BROAD; d++) v[d] = load(mine + LANES * d);
            UNROLLED
            for (int q = 0; q < RQ; q++) {
                const Floats weight = all(scores[q][k]);
                UNROLLED
                for (int d = 0; d < BROAD; d++) sum[q][d] += weight * v[d];
            }
        }
        UNROLLED
        for (int q = 0; q < RQ; q++)
            UNROLLED
            for (int d = 0; d < BROAD; d++) store(seen.values[q] + LANES * (from + d), sum[q][d]);
    }
}

// Attention over `count` further keys and values, each of width D and contiguous.
template <class T, int VD, int RQ>
void attend_to(const float* query, const T* keys, const T* values, int64_t count, float scale, Attended<VD, RQ>& seen) {
    constexpr int D = VD * LANES;
    alignas(64) float scores[RQ][CHUNK];
    for (int64_t from = 0; from < count; from += CHUNK) {
        const int here = (int)(count - from < CHUNK ? count - from : CHUNK);
        scores_of<T, VD, RQ>(query, keys + from * D, here, scale, scores);
        float kept[RQ];
        UNROLLED
        for (int q = 0; q < RQ; q++) {
            Floats top = all(seen.top[q]);
            for (int k = 0; k < here; k += LANES) top = larger(top, load(scores[q] + k));
            const float highest = largest(top);
            Floats total = {};
            for (int k = 0; k < here; k += LANES) {
                Floats weight = exponential(load(scores[q] + k) - highest);
                store(scores[q] + k, weight);
                total += weight;
            }
            kept[q] = exponential(all(seen.top[q] - highest))[0];
            const int beyond = here % LANES ? LANES - here % LANES : 0;  // padding weighs e^-87: subtract it from the sum
            for (int k = here; k < here + beyond; k++) scores[q][k] = 0;
            seen.total[q] = seen.total[q] * kept[q] + sum(total);
            seen.top[q] = highest;
        }
        add_values<T, VD, RQ>(values + from * D, here, kept, scores, seen);
    }
}

// Output of the queries, in the order of the values.
template <class T, int VD, int RQ>
void write(const Attended<VD, RQ>& seen, T* out) {
    constexpr int D = VD * LANES;
    UNROLLED
    for (int q = 0; q < RQ; q++) {
        const float share = 1.0f / seen.total[q];
        alignas(64) float ordered[D];
        if constexpr (in_pairs<T, VD>) {
            for (int from = 0; from < D; from += 32)
                for (int i = 0; i < 8; i++)  // 4 of the low halves, 4 of the high ones
                    std::memcpy(ordered + from + 4 * i, seen.values[q] + from + (i % 2) * 16 + (i / 2) * 4, 16);
        } else {
            std::memcpy(ordered, seen.values[q], sizeof ordered);
        }
        UNROLLED
        for (int d = 0; d < VD; d++) store(out + q * D + LANES * d, load(ordered + LANES * d) * share);
    }
}

}  // namespace

extern "C" {

// Arguments of a decode step that all layers share. The layout is mirrored in decode.py.
struct Step {
    int64_t rows;         // running rows
    int64_t heads;        // key heads
    int64_t repeats;      // query heads per key head
    int64_t width;        // head width D
    int64_t column;       // step column: column of the own keys that this step writes
    int64_t threads;
    const int64_t* starts;   // [rows] first column that a row sees
    const int64_t* owners;   // [rows] prompt of each row
    const int64_t* lengths;  // [prompts] number of keys of each prompt
    const int64_t* places;   // [rows] positions; unused without rotation
    const float* cosines;    // [positions, D], or null: queries and keys are rotated already
    const float* sines;      // [positions, D], with the signs of `rotate_half`
    double scale;
    double epsilon;
};

// Address and strides of heads: element d of a head is x[row * by_row + head * by_head + d].
struct Heads {
    void* data;
    int64_t by_row, by_head;
};

// KV cache of one layer, [2, rows or prompts, heads, columns, D], contiguous in its last two dimensions.
struct CacheTable {
    void* data;
    int64_t by_kind, by_row, by_head;
};

// covey_matmul_fp32_share of matmul_fp32.cpp, and covey_transpose_fp32, which transposes its input.
typedef void Transpose(const void* x, int64_t rows, int64_t in_features, void* room);
typedef void Share(const void* x, int64_t rows, int64_t in_features, int64_t out_features, const void* weight, const float* bias,
                   void* out);

// A linear layer.
struct Linear {
    const void* weight;
    const float* bias;  // or null
    int64_t in_features, out_features;
};

struct Layer {
    const float *before, *after, *query_norm, *key_norm;  // norm weights; those of heads may be null
    Linear query, key, value, out, gate, up, down;
};

struct Decoder {
    const Layer* layers;
    int64_t count;
    const float* norm;
    Linear head;
    Share* share;
    Transpose* transpose;
};
}

namespace {

// `x` [D], normed if there is a weight and rotated, into `out`.
inline void prepared(const Step& step, int64_t row, const float* weight, float* x, float* out) {
    const int64_t D = step.width, half = D / 2;
    if (weight) {
        float squares = 0;
        for (int64_t d = 0; d < D; d++) squares += x[d] * x[d];
        const float norm = 1.0f / std::sqrt(squares / (float)D + (float)step.epsilon);
        for (int64_t d = 0; d < D; d++) x[d] = x[d] * norm * weight[d];
    }
    if (!step.cosines) {
        std::memcpy(out, x, D * sizeof(float));
        return;
    }
    const float* cos = step.cosines + step.places[row] * D;
    const float* sin = step.sines + step.places[row] * D;
    for (int64_t d = 0; d < half; d++) out[d] = x[d] * cos[d] + x[d + half] * sin[d];
    for (int64_t d = half; d < D; d++) out[d] = x[d] * cos[d] + x[d - half] * sin[d];
}

template <class T, int VD, int RQ>
void attend_some(const Step& step, int64_t row, int64_t head, const float* query, const CacheTable& own, const CacheTable& prompt, T* out) {
    constexpr int64_t D = VD * LANES;
    Attended<VD, RQ> seen;
    const int64_t owner = step.owners[row], start = step.starts[row];
    const T* keys = (const T*)prompt.data + owner * prompt.by_row + head * prompt.by_head;
    attend_to<T, VD, RQ>(query, keys, keys + prompt.by_kind, step.lengths[owner], (float)step.scale, seen);
    keys = (const T*)own.data + row * own.by_row + head * own.by_head + start * D;
    attend_to<T, VD, RQ>(query, keys, keys + own.by_kind, step.column + 1 - start, (float)step.scale, seen);
    write<T, VD, RQ>(seen, out);
}

// One row and one key head: store its key and value, then attend with all its queries.
template <class T, int VD>
void attend_row(const Step& step, int64_t row, int64_t head, const Heads& query, const Heads& key, const Heads& value,
                const float* query_norm, const float* key_norm, const CacheTable& own, const CacheTable& prompt, T* out) {
    constexpr int64_t D = VD * LANES;
    constexpr int MOST = at_once(VD);
    alignas(64) float raw[D], queries[MOST * D];
    T* kept = (T*)own.data + row * own.by_row + head * own.by_head + step.column * D;
    const T* from = (const T*)key.data + row * key.by_row + head * key.by_head;
    UNROLLED
    for (int d = 0; d < VD; d++) store(raw + LANES * d, load(from + LANES * d));
    prepared(step, row, key_norm, raw, queries);
    UNROLLED
    for (int d = 0; d < VD; d++) store(kept + LANES * d, load(queries + LANES * d));
    std::memcpy(kept + own.by_kind, (const T*)value.data + row * value.by_row + head * value.by_head, D * sizeof(T));
    for (int64_t first = 0; first < step.repeats;) {
        const int64_t left = step.repeats - first;
        const int64_t many = left < MOST ? left : MOST;
        for (int64_t q = 0; q < many; q++) {
            const T* x = (const T*)query.data + row * query.by_row + (head * step.repeats + first + q) * query.by_head;
            UNROLLED
            for (int d = 0; d < VD; d++) store(raw + LANES * d, load(x + LANES * d));
            prepared(step, row, query_norm, raw, queries + q * D);
        }
        T* to = out + ((row * step.heads + head) * step.repeats + first) * D;
        if (many == 1) attend_some<T, VD, 1>(step, row, head, queries, own, prompt, to);
        if constexpr (MOST > 1) {
            if (many == 2) attend_some<T, VD, 2>(step, row, head, queries, own, prompt, to);
        }
        if constexpr (MOST > 2) {
            if (many == 3) attend_some<T, VD, 3>(step, row, head, queries, own, prompt, to);
            if (many == 4) attend_some<T, VD, 4>(step, row, head, queries, own, prompt, to);
            if (many == 5) attend_some<T, VD, 5>(step, row, head, queries, own, prompt, to);
        }
        first += many;
    }
}

// Called by all threads of a parallel region, with a barrier at the end, like `add_norm`.
template <class T, int VD>
void attend(const Step& step, const Heads& query, const Heads& key, const Heads& value, const float* query_norm,
            const float* key_norm, const CacheTable& own, const CacheTable& prompt, void* out) {
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < step.rows * step.heads; task++)
        attend_row<T, VD>(step, task / step.heads, task % step.heads, query, key, value, query_norm, key_norm, own,
                          prompt, (T*)out);
}

template <class T>
void add_norm(float* x, const T* update, const float* weight, T* out, int64_t rows, int64_t size, double epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float* mine = x + row * size;
        const int64_t whole = size / LANES * LANES;
        Floats squares = {};
        float rest = 0;
        if (update) {
            const T* more = update + row * size;
            for (int64_t i = 0; i < whole; i += LANES) {
                Floats value = load(mine + i) + load(more + i);
                store(mine + i, value);
                squares += value * value;
            }
            for (int64_t i = whole; i < size; i++) mine[i] += one(more + i), rest += mine[i] * mine[i];
        } else {
            for (int64_t i = 0; i < whole; i += LANES) {
                Floats value = load(mine + i);
                squares += value * value;
            }
            for (int64_t i = whole; i < size; i++) rest += mine[i] * mine[i];
        }
        const float norm = 1.0f / std::sqrt((sum(squares) + rest) / (float)size + (float)epsilon);
        for (int64_t i = 0; i < whole; i += LANES) store(out + row * size + i, load(mine + i) * norm * load(weight + i));
        for (int64_t i = whole; i < size; i++) put(out + row * size + i, mine[i] * norm * weight[i]);
    }
}

// out = silu(gate) * up; `out` may be `gate`.
template <class T>
void gated(const T* gate, const T* up, T* out, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < size; i += LANES)
        if (i + LANES <= size)
            store(out + i, silu(load(gate + i)) * load(up + i));
        else
            for (int64_t j = i; j < size; j++) put(out + j, silu(all(one(gate + j)))[0] * one(up + j));
}

// Called by all threads of a parallel region.
template <class T, int VD>
void decode(const Step& step, const Decoder& decoder, const CacheTable* own, const CacheTable* prompts, float* x, T* scratch, T* logits) {
    const Layer& first = *decoder.layers;
    const int64_t rows = step.rows, hidden = first.query.in_features, heads = step.heads * step.width, wide = first.gate.out_features;
    T *normed = scratch, *updates = normed + rows * hidden, *projected = updates + rows * hidden;
    T *attended = projected + rows * heads * (step.repeats + 2), *inner = attended + rows * first.out.in_features;
    T *ups = inner + rows * wide, *transposed = ups + rows * wide;
    const auto ready = [&](const T* from, int64_t in_features) -> const T* {
        decoder.transpose(from, rows, in_features, transposed);
        return transposed;
    };
    const auto share = [&](const T* from, const Linear& by, T* to) {
        decoder.share(from, rows, by.in_features, by.out_features, by.weight, by.bias, to);
    };
    const auto product = [&](const T* from, const Linear& by, T* to) {
        share(from, by, to);
#pragma omp barrier
    };
    T *keys = projected + rows * heads * step.repeats, *values = keys + rows * heads;
    const Heads query = {projected, heads * step.repeats, step.width}, key = {keys, heads, step.width}, value = {values, heads, step.width};
    const T* more = nullptr;
    for (int64_t i = 0; i < decoder.count; i++) {
        const Layer& layer = decoder.layers[i];
        add_norm(x, more, layer.before, normed, rows, hidden, step.epsilon);
        const T* from = ready(normed, hidden);
        share(from, layer.key, keys), share(from, layer.value, values);
        product(from, layer.query, projected);
        attend<T, VD>(step, query, key, value, layer.query_norm, layer.key_norm, own[i], prompts[i], attended);
        product(ready(attended, layer.out.in_features), layer.out, updates);
        add_norm(x, (const T*)updates, layer.after, normed, rows, hidden, step.epsilon);
        from = ready(normed, hidden);
        share(from, layer.gate, inner);
        product(from, layer.up, ups);
        gated((const T*)inner, (const T*)ups, inner, rows * wide);
        product(ready(inner, layer.down.in_features), layer.down, updates);
        more = updates;
    }
    add_norm(x, more, decoder.norm, normed, rows, hidden, step.epsilon);
    share(ready(normed, hidden), decoder.head, logits);
}

}  // namespace

extern "C" {

// Store keys and values of this step's tokens in column `step.column` of `own`, and the attention output of their queries in `out`
// [rows, heads * repeats, D].
void covey_attend(const Step* step, const Heads* query, const Heads* key, const Heads* value, const float* query_norm,
                  const float* key_norm, const CacheTable* own, const CacheTable* prompt, void* out) {
#pragma omp parallel num_threads(step->threads) if (step->threads > 1 && step->rows * step->heads > 8)
    attend<NUMBER, VECTORS>(*step, *query, *key, *value, query_norm, key_norm, *own, *prompt, out);
}

// x [rows, size] += update (if not null); out = x / rms(x) * weight.
void covey_add_norm(float* x, const void* update, const float* weight, void* out, int64_t rows, int64_t size,
                    double epsilon, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * size > 16384)
    add_norm<NUMBER>(x, (const NUMBER*)update, weight, (NUMBER*)out, rows, size, epsilon);
}

// A decode step: `logits` [rows, vocabulary] of the embedded tokens `x` [rows, hidden], which are overwritten. `own` and
// `prompts` are the caches of all layers. `scratch` holds [rows, 2 hidden + heads of queries, keys and values + inputs of out +
// outputs of gate and up], followed by the transposed input of the widest matmul.
void covey_decode(const Step* step, const Decoder* decoder, const CacheTable* own, const CacheTable* prompts, float* x, void* scratch,
                  void* logits) {
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
    decode<NUMBER, VECTORS>(*step, *decoder, own, prompts, x, (NUMBER*)scratch, (NUMBER*)logits);
}
}
