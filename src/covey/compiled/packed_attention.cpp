// Attention of packed rows `[prompt | c1 | ... | cG]` on a CPU, forward and backward: every completion token sees the
// prompt and its own completion up to itself; a prompt's token sees the prompt up to itself.
//
// One task is one prompt and one head of keys. It copies the prompt's keys and values into the order in which products
// read them, once for all completions and query heads, and puts each completion's own behind them in turn, so that a
// block of queries meets all it sees as one row of keys. Sums are in float32 whatever the numbers' precision.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

namespace {

constexpr int BLOCK = 24;  // queries at a time

#ifdef WIDE
constexpr int DEEP = 6, BROAD = 4;  // rows and vectors of a tile: 24 sums, 4 factors, 1 broadcast in 32 registers
#else
constexpr int DEEP = 6, BROAD = 1;  // each vector is two registers of 16
#endif

// Rows of A or C, and how far apart; a factor of A is at row * by_row + k * by_k.
struct Rows {
    const float* data;
    int64_t by_row, by_k;
};

// Vectors of B: the j-th of row k is at k * by_k + j * by_vector.
struct Vectors {
    const float* data;
    int64_t by_k, by_vector;
};

struct Target {
    float* data;
    int64_t by_row;
    bool adds;
};

template <int M, int N>
inline void tile(Rows a, Vectors b, Target c, int64_t depth) {
    Floats sums[M][N];
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) sums[m][n] = c.adds ? load(c.data + m * c.by_row + n * LANES) : Floats{};
    for (int64_t k = 0; k < depth; k++) {
        Floats factors[N];
        UNROLLED
        for (int n = 0; n < N; n++) factors[n] = load(b.data + k * b.by_k + n * b.by_vector);
        UNROLLED
        for (int m = 0; m < M; m++) {
            const Floats one = all(a.data[m * a.by_row + k * a.by_k]);
            UNROLLED
            for (int n = 0; n < N; n++) sums[m][n] += one * factors[n];
        }
    }
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) store(c.data + m * c.by_row + n * LANES, sums[m][n]);
}

template <int M, int N>
void band(Rows a, Vectors b, Target c, int64_t vectors, int64_t depth) {
    for (; vectors >= N; vectors -= N) {
        tile<M, N>(a, b, c, depth);
        b.data += N * b.by_vector;
        c.data += N * LANES;
    }
    if constexpr (N > 1)
        if (vectors) band<M, N / 2>(a, b, c, vectors, depth);
}

template <int M>
void last_band(Rows a, Vectors b, Target c, int64_t rows, int64_t vectors, int64_t depth) {
    if (rows == M) return band<M, BROAD>(a, b, c, vectors, depth);
    if constexpr (M > 1) last_band<M - 1>(a, b, c, rows, vectors, depth);
}

// C [rows, 16 * vectors] (+)= A [rows, depth] times B [depth, 16 * vectors].
void multiply(Rows a, Vectors b, Target c, int64_t rows, int64_t vectors, int64_t depth) {
    for (; rows >= DEEP; rows -= DEEP) {
        band<DEEP, BROAD>(a, b, c, vectors, depth);
        a.data += DEEP * a.by_row;
        c.data += DEEP * c.by_row;
    }
    if (rows) last_band<DEEP - 1>(a, b, c, rows, vectors, depth);
}

inline int64_t in_vectors(int64_t count) { return (count + LANES - 1) / LANES; }

// Rows of D numbers with a vector of columns next to each other: 16 columns, D rows, then the next 16.
inline float* column_of(float* across, int64_t column, int64_t D) {
    return across + column / LANES * LANES * D + column % LANES;
}

}  // namespace

extern "C" {

// One head after another, one token after another; the numbers of a token's head are contiguous.
struct Heads {
    void* data;
    int64_t by_head, by_token;
};

// Where prompts and completions stand. The layout is mirrored in packed_attention.py.
struct Packed {
    int64_t segments;
    int64_t heads;    // of keys
    int64_t repeats;  // query heads a key head
    int64_t width;    // of a head, D
    int64_t tokens;   // of the row
    int64_t most;     // keys that one token sees, at most
    int64_t threads;
    const int64_t* starts;   // [segments] a prompt's first token
    const int64_t* lengths;  // [segments] its tokens
    const int64_t* firsts;   // [segments + 1] its first completion in `counts`
    const int64_t* counts;   // [completions] tokens of each; they follow the prompt without a gap
    float* rooms;            // [threads, what `covey_shared_room` says] zeros
    double scale;
};

int omp_get_thread_num(void);
}

namespace {

template <class T>
inline T* at(const Heads& x, int64_t head, int64_t token) {
    return (T*)x.data + head * x.by_head + token * x.by_token;
}

template <class T>
inline void copy_in(const T* from, float* to, int64_t D, float scale = 1.0f) {
    for (int64_t d = 0; d < D; d += LANES) store(to + d, load(from + d) * scale);
}

template <class T>
inline void copy_out(const float* from, T* to, int64_t D, float scale = 1.0f) {
    for (int64_t d = 0; d < D; d += LANES) store(to + d, load(from + d) * scale);
}

// What one thread works in: zeros at first, since columns beyond the last key are multiplied too.
struct Room {
    int64_t D, columns;
    float *keys_across, *keys, *values_across, *values;  // columns x D; across: 16 columns next to each other
    float *key_sums, *value_sums;                        // gradients, columns x D
    float *query, *other, *out;                          // BLOCK x D
    float *weights, *slopes;                             // BLOCK x columns

    static int64_t size(const Packed& packed, bool backward) {
        const int64_t columns = in_vectors(packed.most) * LANES, D = packed.width;
        return (backward ? 6 : 2) * columns * D + 3 * BLOCK * D + (backward ? 2 : 1) * BLOCK * columns;
    }

    Room(const Packed& packed, bool backward) : D(packed.width), columns(in_vectors(packed.most) * LANES) {
        float* next = packed.rooms + omp_get_thread_num() * size(packed, backward);
        auto take = [&next](int64_t count) {
            float* mine = next;
            next += count;
            return mine;
        };
        const int64_t side = columns * D, block = BLOCK * D, scores = BLOCK * columns;
        keys_across = take(side), values = take(side), query = take(block), other = take(block), out = take(block);
        weights = take(scores);
        if (!backward) return;
        keys = take(side), values_across = take(side), key_sums = take(side), value_sums = take(side);
        slopes = take(scores);
    }

    void put_across(float* across, int64_t column, const float* x) const {
        float* to = column_of(across, column, D);
        for (int64_t d = 0; d < D; d++) to[d * LANES] = x[d];
    }
};

template <class T>
void take_keys(Room& room, const Heads& key, const Heads& value, int64_t head, int64_t token, int64_t count, int64_t column, bool backward) {
    for (int64_t i = 0; i < count; i++, column++) {
        const int64_t D = room.D;
        float* mine = backward ? room.keys + column * D : room.out;
        copy_in(at<T>(key, head, token + i), mine, D);
        room.put_across(room.keys_across, column, mine);
        copy_in(at<T>(value, head, token + i), room.values + column * D, D);
        if (backward) room.put_across(room.values_across, column, room.values + column * D);
    }
}

// Products of `rows` queries from the block with all keys up to `columns`.
void products(const Room& room, const float* block, const float* across, float* out, int64_t rows, int64_t columns) {
    multiply({block, room.D, 1}, {across, LANES, LANES * room.D}, {out, room.columns, false}, rows, in_vectors(columns), room.D);
}

// Sums of `rows` weighted rows of D numbers.
void weighted(const Room& room, const float* weights, const float* x, float* out, int64_t rows, int64_t columns) {
    multiply({weights, room.columns, 1}, {x, room.D, LANES}, {out, room.D, false}, rows, room.D / LANES, columns);
}

// Scores beyond what a query sees, up to a whole vector beyond what the block sees.
inline void hide(float* row, int64_t visible, int64_t columns, float nothing) {
    for (int64_t k = visible; k < in_vectors(columns) * LANES; k++) row[k] = nothing;
}

struct Piece {
    int64_t token, count, prefix;  // its first token, its tokens, and the keys before its own
};

template <class T>
void forward_piece(const Packed& packed, Room& room, const Heads& query, const Heads& out, float* normalizer, int64_t head, Piece piece) {
    const int64_t D = room.D;
    for (int64_t from = 0; from < piece.count; from += BLOCK) {
        const int64_t rows = piece.count - from < BLOCK ? piece.count - from : BLOCK;
        const int64_t columns = piece.prefix + from + rows, first = piece.token + from;
        for (int64_t m = 0; m < rows; m++) copy_in(at<T>(query, head, first + m), room.query + m * D, D, (float)packed.scale);
        products(room, room.query, room.keys_across, room.weights, rows, columns);
        float shares[BLOCK];
        for (int64_t m = 0; m < rows; m++) {
            float* row = room.weights + m * room.columns;
            const int64_t visible = columns - rows + m + 1;
            hide(row, visible, columns, NOTHING);
            Floats top = all(NOTHING), total = {};
            for (int64_t k = 0; k < visible; k += LANES) top = larger(top, load(row + k));
            const float highest = largest(top);
            for (int64_t k = 0; k < columns; k += LANES) {
                const Floats weight = exponential(load(row + k) - highest);
                store(row + k, weight);
                total += weight;
            }
            const float whole = sum(total);
            shares[m] = 1.0f / whole;
            normalizer[head * packed.tokens + first + m] = highest + std::log(whole);
        }
        weighted(room, room.weights, room.values, room.out, rows, columns);
        for (int64_t m = 0; m < rows; m++) copy_out(room.out + m * D, at<T>(out, head, first + m), D, shares[m]);
    }
}

struct Given {
    Heads query, key, value, out, gradient;
    const float* normalizer;
    Heads query_gradient, key_gradient, value_gradient;
};

template <class T>
void backward_piece(const Packed& packed, Room& room, const Given& given, int64_t head, Piece piece) {
    const int64_t D = room.D;
    for (int64_t from = 0; from < piece.count; from += BLOCK) {
        const int64_t rows = piece.count - from < BLOCK ? piece.count - from : BLOCK;
        const int64_t columns = piece.prefix + from + rows, first = piece.token + from;
        float inner[BLOCK];
        for (int64_t m = 0; m < rows; m++) {
            copy_in(at<T>(given.query, head, first + m), room.query + m * D, D, (float)packed.scale);
            copy_in(at<T>(given.gradient, head, first + m), room.other + m * D, D);
            const T* out = at<T>(given.out, head, first + m);
            Floats total = {};
            for (int64_t d = 0; d < D; d += LANES) total += load(room.other + m * D + d) * load(out + d);
            inner[m] = sum(total);
        }
        products(room, room.query, room.keys_across, room.weights, rows, columns);
        products(room, room.other, room.values_across, room.slopes, rows, columns);
        for (int64_t m = 0; m < rows; m++) {
            float *row = room.weights + m * room.columns, *slope = room.slopes + m * room.columns;
            const int64_t visible = columns - rows + m + 1;
            const float normalizer = given.normalizer[head * packed.tokens + first + m];
            for (int64_t k = 0; k < visible; k += LANES) store(row + k, exponential(load(row + k) - normalizer));
            hide(row, visible, columns, 0);
            for (int64_t k = 0; k < columns; k += LANES) store(slope + k, load(row + k) * (load(slope + k) - inner[m]));
        }
        const Rows weights = {room.weights, 1, room.columns}, slopes = {room.slopes, 1, room.columns};
        multiply(weights, {room.other, D, LANES}, {room.value_sums, D, true}, columns, D / LANES, rows);
        multiply(slopes, {room.query, D, LANES}, {room.key_sums, D, true}, columns, D / LANES, rows);
        weighted(room, room.slopes, room.keys, room.out, rows, columns);
        for (int64_t m = 0; m < rows; m++)
            copy_out(room.out + m * D, at<T>(given.query_gradient, head, first + m), D, (float)packed.scale);
    }
}

// Calls `visit(piece)` for the prompt and then for each of its completions.
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
        Room room(packed, false);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t head = task % packed.heads;
            each_piece(packed, task / packed.heads, [&](Piece piece) {
                take_keys<T>(room, key, value, head, piece.token, piece.count, piece.prefix, false);
                for (int64_t r = 0; r < packed.repeats; r++)
                    forward_piece<T>(packed, room, query, out, normalizer, head * packed.repeats + r, piece);
            });
        }
    }
}

template <class T>
void give_sums(const Room& room, const Given& given, int64_t head, int64_t token, int64_t count, int64_t column) {
    for (int64_t i = 0; i < count; i++) {
        copy_out(room.key_sums + (column + i) * room.D, at<T>(given.key_gradient, head, token + i), room.D);
        copy_out(room.value_sums + (column + i) * room.D, at<T>(given.value_gradient, head, token + i), room.D);
    }
}

template <class T>
void backward(const Packed& packed, const Given& given) {
    const int64_t tasks = packed.segments * packed.heads;
#pragma omp parallel num_threads(packed.threads)
    {
        Room room(packed, true);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t segment = task / packed.heads, head = task % packed.heads, D = room.D;
            each_piece(packed, segment, [&](Piece piece) {
                take_keys<T>(room, given.key, given.value, head, piece.token, piece.count, piece.prefix, true);
                std::memset(room.key_sums + piece.prefix * D, 0, piece.count * D * sizeof(float));
                std::memset(room.value_sums + piece.prefix * D, 0, piece.count * D * sizeof(float));
                for (int64_t r = 0; r < packed.repeats; r++)
                    backward_piece<T>(packed, room, given, head * packed.repeats + r, piece);
                if (piece.prefix) give_sums<T>(room, given, head, piece.token, piece.count, piece.prefix);
            });
            give_sums<T>(room, given, head, packed.starts[segment], packed.lengths[segment], 0);
        }
    }
}

}  // namespace

extern "C" {

// Numbers in float32 that one thread works in.
int64_t covey_shared_room(const Packed* packed, int64_t backward) { return Room::size(*packed, backward); }

// What the queries see into `out`, log-sum-exp of their scores into `normalizer` [query heads, tokens].
void covey_shared_forward(const Packed* packed, const Heads* query, const Heads* key, const Heads* value, const Heads* out, float* normalizer) {
    forward<NUMBER>(*packed, *query, *key, *value, *out, normalizer);
}

// Gradients of queries, keys and values from that of `out`.
void covey_shared_backward(const Packed* packed, const Heads* gradient, const Heads* query, const Heads* key, const Heads* value,
                           const Heads* out, const float* normalizer, const Heads* query_gradient, const Heads* key_gradient,
                           const Heads* value_gradient) {
    backward<NUMBER>(*packed, {*query, *key, *value, *out, *gradient, normalizer, *query_gradient, *key_gradient, *value_gradient});
}
}
