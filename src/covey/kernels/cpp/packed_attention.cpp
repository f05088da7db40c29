// Attention of packed rows `[prompt | c1 | ... | cG]` on a CPU, forward and backward: every completion token sees the
// prompt and its own completion up to itself; a prompt token sees the prompt up to itself.
//
// A task is one prompt and one key head. It copies the prompt's keys and values into the layout of the matmuls, once for all
// completions and query heads, then appends those of one completion after another, so that all keys of a block of queries are
// contiguous. Sums are in float32 in every precision.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "blocks.h"

namespace {

constexpr int BLOCK = 24;  // queries per block

#ifdef PAIRS
template <class T>
constexpr bool in_pairs = sizeof(T) == sizeof(bf16);
template <class T>
using Word = std::conditional_t<in_pairs<T>, Pair, float>;
#else
template <class T>
constexpr bool in_pairs = false;
template <class T>
using Word = float;
#endif

inline int64_t in_vectors(int64_t count) { return (count + LANES - 1) / LANES; }

}  // namespace

extern "C" {

// Address and strides of [heads, tokens, D], contiguous in D.
struct Heads {
    void* data;
    int64_t by_head, by_token;
};

// Positions of prompts and completions. The layout is mirrored in packed_attention.py.
struct Packed {
    int64_t segments;
    int64_t heads;    // key heads
    int64_t repeats;  // query heads per key head
    int64_t width;    // head width D
    int64_t tokens;   // tokens of the row
    int64_t most;     // most keys that a token sees
    int64_t threads;
    const int64_t* starts;   // [segments] first token of each prompt
    const int64_t* lengths;  // [segments] tokens of each prompt
    const int64_t* firsts;   // [segments + 1] first completion of each prompt in `counts`
    const int64_t* counts;   // [completions] tokens of each; completions follow the prompt without gaps
    float* scratch;            // [threads, `covey_shared_scratch`] zeros
    double scale;            // positive
};

int omp_get_thread_num(void);
}

namespace {

template <class T>
inline T* at(const Heads& x, int64_t head, int64_t token) {
    return (T*)x.data + head * x.by_head + token * x.by_token;
}

template <class T>
inline void copy_out(const float* from, T* to, int64_t D, float scale = 1.0f) {
    for (int64_t d = 0; d < D; d += LANES) store(to + d, load(from + d) * scale);
}

// Scratch space of one thread, initialized to zero: columns beyond the last key are multiplied too.
//
// Rows of D elements are stored in up to three layouts of words (a float32, or two bfloat16). along: row-major, a word holds two
// adjacent elements of a row. down: a word holds the same element of two rows. across: as many rows as lanes interleaved. For
// float32, along and down are the same.
template <class T>
struct Scratch {
    using W = Word<T>;
    using Number = std::conditional_t<in_pairs<T>, T, float>;  // element of a word
    static constexpr int64_t PER = sizeof(W) / sizeof(Number);

    int64_t D, columns;
    W *keys_across, *values_down, *query;                                           // [columns, D], and a block of queries
    W *keys_down, *values_across, *gradient, *query_down, *gradient_down;           // for the backward
    float *out, *weights, *slopes;                                                  // [BLOCK, D], and [BLOCK, columns]: softmax weights and score gradients
    float *key_sums, *value_sums;                                                   // gradients of keys and values, [columns, D]

    static int64_t size(const Packed& packed, bool backward) {
        const int64_t columns = in_vectors(packed.most) * LANES, side = columns * packed.width, block = BLOCK * packed.width;
        if (!backward) return (2 * side + block) / PER + block + BLOCK * columns;
        return (4 * side + 2 * block * PER) / PER + block + 2 * BLOCK * columns + 2 * side;
    }

    Scratch(const Packed& packed, bool backward) : D(packed.width), columns(in_vectors(packed.most) * LANES) {
        float* next = packed.scratch + omp_get_thread_num() * size(packed, backward);
        auto take = [&next](int64_t count) {
            float* mine = next;
            next += count;
            return mine;
        };
        const int64_t side = columns * D, block = BLOCK * D;
        auto words = [&take](int64_t numbers) { return (W*)take(numbers / PER); };
        keys_across = words(side), values_down = words(side), query = words(block);
        out = take(block), weights = take(BLOCK * columns);
        if (!backward) return;
        keys_down = words(side), values_across = words(side), gradient = words(block);
        query_down = PER > 1 ? words(block) : query, gradient_down = PER > 1 ? words(block) : gradient;
        slopes = take(BLOCK * columns), key_sums = take(side), value_sums = take(side);
    }

    void put_along(W* along, int64_t index, const T* x) const {
        for (int64_t d = 0; d < D; d += LANES) store((Number*)along + index * D + d, load(x + d));
    }

    static Words words_at(const W* p) {
        Words x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }

    // Store a row in layout `down`. An even row clears the second half of its words.
    void put_down(W* down, int64_t index, const T* x) const {
        if constexpr (PER == 1)
            put_along(down, index, x);
        else
            for (int64_t d = 0; d < D; d += LANES) {
                W* to = down + index / PER * D + d;
                Words both = words_of(x + d);
                if (index % 2) both = both << 16 | (words_at(to) & 0xffff);
                std::memcpy((void*)to, &both, sizeof both);
            }
    }

    void put_across(W* across, int64_t column, const T* x) const {
        alignas(64) W row[LANES];
        W* to = across + column / LANES * LANES * (D / PER) + column % LANES;
        for (int64_t d = 0; d < D; d += LANES, to += LANES * LANES / PER) {
            store((Number*)row, load(x + d));
            UNROLLED
            for (int i = 0; i < LANES / PER; i++) to[i * LANES] = row[i];
        }
    }

    // Scores: products of `rows` rows `along` with the first `count` rows `across`.
    void products(const W* along, const W* across, float* scores, int64_t rows, int64_t count) const {
        const int64_t words = D / PER;
        multiply<W>({along, words, 1}, {across, LANES, LANES * words}, {scores, columns, false}, rows, in_vectors(count), words);
    }

    // `out`: for each of `rows`, the sum of `count` rows weighted by its weights, which have replaced its scores.
    void weighted(const float* weights, const W* down, int64_t rows, int64_t count) const {
        multiply<W>({(const W*)weights, columns, 1}, {down, D, LANES}, {out, D, false}, rows, D / LANES, (count + PER - 1) / PER);
    }

    // Add the block's weighted `rows` to each of `count` sums; the weights are in layout `down`.
    void add(float* sums, const float* weights, const W* down, int64_t rows, int64_t count) const {
        multiply<W>({(const W*)weights, 1, PER * columns}, {down, D, LANES}, {sums, D, true}, count, D / LANES, (rows + PER - 1) / PER);
    }
};

template <class T>
void take_keys(Scratch<T>& scratch, const Heads& key, const Heads& value, int64_t head, int64_t token, int64_t count, int64_t column, bool backward) {
    for (int64_t i = 0; i < count; i++, column++) {
        const T *one = at<T>(key, head, token + i), *other = at<T>(value, head, token + i);
        scratch.put_across(scratch.keys_across, column, one);
        scratch.put_down(scratch.values_down, column, other);
        if (!backward) continue;
        scratch.put_down(scratch.keys_down, column, one);
        scratch.put_across(scratch.values_across, column, other);
    }
}

// Mask the scores of keys that a query does not see, up to the block's last whole vector.
inline void hide(float* row, int64_t visible, int64_t columns, float nothing) {
    const int32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Ints lanes;
    std::memcpy(&lanes, order, sizeof lanes);
    for (int64_t k = visible / LANES * LANES; k < columns; k += LANES)
        store(row + k, lanes < (int32_t)(visible - k) ? load(row + k) : all(nothing));
}

struct Piece {
    int64_t token, count, prefix;  // first token, number of tokens, number of keys before its own
};

template <class T>
void forward_piece(const Packed& packed, Scratch<T>& scratch, const Heads& query, const Heads& out, float* normalizer, int64_t head, Piece piece) {
    const int64_t D = scratch.D;
    const float scale = (float)packed.scale;
    for (int64_t from = 0; from < piece.count; from += BLOCK) {
        const int64_t rows = piece.count - from < BLOCK ? piece.count - from : BLOCK;
        const int64_t columns = piece.prefix + from + rows, first = piece.token + from;
        for (int64_t m = 0; m < rows; m++) scratch.put_along(scratch.query, m, at<T>(query, head, first + m));
        scratch.products(scratch.query, scratch.keys_across, scratch.weights, rows, columns);
        float shares[BLOCK];
        for (int64_t m = 0; m < rows; m++) {
            float* row = scratch.weights + m * scratch.columns;
            const int64_t visible = columns - rows + m + 1;
            hide(row, visible, columns, NOTHING);
            Floats top = all(NOTHING), total = {};
            for (int64_t k = 0; k < visible; k += LANES) top = larger(top, load(row + k));
            const float highest = largest(top);
            for (int64_t k = 0; k < columns; k += LANES) {
                const Floats weight = exponential((load(row + k) - highest) * scale);
                store((typename Scratch<T>::Number*)row + k, weight);
                total += weight;
            }
            const float whole = sum(total);
            shares[m] = 1.0f / whole;
            normalizer[head * packed.tokens + first + m] = highest * scale + std::log(whole);
        }
        scratch.weighted(scratch.weights, scratch.values_down, rows, columns);
        for (int64_t m = 0; m < rows; m++) copy_out(scratch.out + m * D, at<T>(out, head, first + m), D, shares[m]);
    }
}

struct Given {
    Heads query, key, value, out, gradient;
    const float* normalizer;
    Heads query_gradient, key_gradient, value_gradient;
};

// Softmax weights of one row in place of its scores, and gradients of its scores in place of those of its weights.
inline void slope(float* weights, float* slopes, int64_t visible, int64_t columns, float scale, float normalizer, float inner) {
    for (int64_t k = 0; k < visible; k += LANES)  // above zero by rounding only
        store(weights + k, exponential(-larger(all(0.0f), normalizer - load(weights + k) * scale)));
    hide(weights, visible, columns, 0);
    for (int64_t k = 0; k < columns; k += LANES) store(slopes + k, load(weights + k) * (load(slopes + k) - inner) * scale);
    hide(slopes, visible, columns, 0);  // an earlier piece may have left NaN there
}

// Convert rows m and m + 1 (if it exists) to words: weights `down` in place of the weights of m, slopes `down` in place of the
// weights of m + 1, and slopes `along` in place.
template <class T>
void into_words(const Scratch<T>& scratch, int64_t m, bool is_last, int64_t columns) {
    const int64_t after = is_last ? 0 : scratch.columns;
    float *weights = scratch.weights + m * scratch.columns, *slopes = scratch.slopes + m * scratch.columns;
    for (int64_t k = 0; k < columns; k += LANES) {
        const Floats rows[] = {load(weights + k), load(weights + after + k), load(slopes + k), load(slopes + after + k)};
        alignas(64) bf16 narrow[4][LANES];
        UNROLLED
        for (int i = 0; i < 4; i++) store(narrow[i], is_last && i % 2 ? Floats{} : rows[i]);
        const Words down[] = {words_of(narrow[0]) | words_of(narrow[1]) << 16, words_of(narrow[2]) | words_of(narrow[3]) << 16};
        std::memcpy((void*)(weights + k), down, sizeof down[0]);
        std::memcpy((void*)(weights + scratch.columns + k), down + 1, sizeof down[1]);
        std::memcpy((bf16*)slopes + k, narrow[2], sizeof narrow[2]);
        std::memcpy((bf16*)(slopes + scratch.columns) + k, narrow[3], sizeof narrow[3]);
    }
}

template <class T>
void backward_piece(const Packed& packed, Scratch<T>& scratch, const Given& given, int64_t head, Piece piece) {
    const int64_t D = scratch.D;
    for (int64_t from = 0; from < piece.count; from += BLOCK) {
        const int64_t rows = piece.count - from < BLOCK ? piece.count - from : BLOCK;
        const int64_t columns = piece.prefix + from + rows, first = piece.token + from;
        float inner[BLOCK];
        for (int64_t m = 0; m < rows; m++) {
            const T *query = at<T>(given.query, head, first + m), *gradient = at<T>(given.gradient, head, first + m);
            const T* out = at<T>(given.out, head, first + m);
            scratch.put_along(scratch.query, m, query), scratch.put_along(scratch.gradient, m, gradient);
            if (scratch.PER > 1) scratch.put_down(scratch.query_down, m, query), scratch.put_down(scratch.gradient_down, m, gradient);
            Floats total = {};
            for (int64_t d = 0; d < D; d += LANES) total += load(gradient + d) * load(out + d);
            inner[m] = sum(total);
        }
        scratch.products(scratch.query, scratch.keys_across, scratch.weights, rows, columns);
        scratch.products(scratch.gradient, scratch.values_across, scratch.slopes, rows, columns);
        for (int64_t m = 0; m < rows; m++)
            slope(scratch.weights + m * scratch.columns, scratch.slopes + m * scratch.columns, columns - rows + m + 1, columns,
                  (float)packed.scale, given.normalizer[head * packed.tokens + first + m], inner[m]);
        if constexpr (in_pairs<T>)
            for (int64_t m = 0; m < rows; m += 2) into_words(scratch, m, m + 1 == rows, columns);
        scratch.add(scratch.value_sums, scratch.weights, scratch.gradient_down, rows, columns);
        scratch.add(scratch.key_sums, in_pairs<T> ? scratch.weights + scratch.columns : scratch.slopes, scratch.query_down, rows, columns);
        scratch.weighted(scratch.slopes, scratch.keys_down, rows, columns);
        for (int64_t m = 0; m < rows; m++) copy_out(scratch.out + m * D, at<T>(given.query_gradient, head, first + m), D);
    }
}

// Call `visit(piece)` for the prompt, then for each of its completions.
template <class Visit>
void each_piece(const Packed& packed, int64_t segment, Visit visit) {
    const int64_t start = packed.starts[segment], length = packed.lengths[segment];
    visit(Piece{start, length, 0});
    int64_t token = start + length;
    for (int64_t i = packed.firsts[segment]; i < packed.firsts[segment + 1]; i++) {
        const int64_t count = packed.counts[i];
        if (count) visit(Piece{token, count, length});
        token += count;
    }
}

template <class T>
void forward(const Packed& packed, const Heads& query, const Heads& key, const Heads& value, const Heads& out, float* normalizer) {
    const int64_t tasks = packed.segments * packed.heads;
#pragma omp parallel num_threads(packed.threads)
    {
        Scratch<T> scratch(packed, false);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t head = task % packed.heads;
            each_piece(packed, task / packed.heads, [&](Piece piece) {
                take_keys<T>(scratch, key, value, head, piece.token, piece.count, piece.prefix, false);
                for (int64_t r = 0; r < packed.repeats; r++)
                    forward_piece<T>(packed, scratch, query, out, normalizer, head * packed.repeats + r, piece);
            });
        }
    }
}

template <class T>
void give_sums(const Scratch<T>& scratch, const Given& given, int64_t head, int64_t token, int64_t count, int64_t column) {
    for (int64_t i = 0; i < count; i++) {
        copy_out(scratch.key_sums + (column + i) * scratch.D, at<T>(given.key_gradient, head, token + i), scratch.D);
        copy_out(scratch.value_sums + (column + i) * scratch.D, at<T>(given.value_gradient, head, token + i), scratch.D);
    }
}

template <class T>
void backward(const Packed& packed, const Given& given) {
    const int64_t tasks = packed.segments * packed.heads;
#pragma omp parallel num_threads(packed.threads)
    {
        Scratch<T> scratch(packed, true);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t segment = task / packed.heads, head = task % packed.heads, D = scratch.D;
            each_piece(packed, segment, [&](Piece piece) {
                take_keys<T>(scratch, given.key, given.value, head, piece.token, piece.count, piece.prefix, true);
                std::memset(scratch.key_sums + piece.prefix * D, 0, piece.count * D * sizeof(float));
                std::memset(scratch.value_sums + piece.prefix * D, 0, piece.count * D * sizeof(float));
                for (int64_t r = 0; r < packed.repeats; r++)
                    backward_piece<T>(packed, scratch, given, head * packed.repeats + r, piece);
                if (piece.prefix) give_sums<T>(scratch, given, head, piece.token, piece.count, piece.prefix);
            });
            give_sums<T>(scratch, given, head, packed.starts[segment], packed.lengths[segment], 0);
        }
    }
}

}  // namespace

extern "C" {

// Size of a thread's scratch space, in floats.
int64_t covey_shared_scratch(const Packed* packed, int64_t backward) { return Scratch<NUMBER>::size(*packed, backward); }

// Attention output in `out`, log-sum-exp of the scores in `normalizer` [query heads, tokens].
void covey_shared_forward(const Packed* packed, const Heads* query, const Heads* key, const Heads* value, const Heads* out, float* normalizer) {
    forward<NUMBER>(*packed, *query, *key, *value, *out, normalizer);
}

// Gradients of queries, keys and values from the gradient of `out`.
void covey_shared_backward(const Packed* packed, const Heads* gradient, const Heads* query, const Heads* key, const Heads* value,
                           const Heads* out, const float* normalizer, const Heads* query_gradient, const Heads* key_gradient,
                           const Heads* value_gradient) {
    backward<NUMBER>(*packed, {*query, *key, *value, *out, *gradient, normalizer, *query_gradient, *key_gradient, *value_gradient});
}
}
