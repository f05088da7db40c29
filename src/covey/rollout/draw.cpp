// One token of each row of logits, drawn by inverting its cumulative distribution, on a CPU: two passes over the logits where
// they are, and a third over one block of them. Numbers are float32 or bfloat16, sums of blocks are in float32, sums of those in float64.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 256;  // tokens whose weights are summed before the token is looked for among them
constexpr float IMPOSSIBLE = -87.0f;  // below, a weight is nothing: `exponential` would give e^-87 for all

inline Floats weights(Floats x, float top) {
    const Floats fall = x - top;
    return fall < all(IMPOSSIBLE) ? Floats{} : exponential(fall);
}

struct Drawn {
    int64_t token;
    float logp;
};

// The first token whose cumulative weight is above `uniform` of the total; never one of no weight. `sums` is for one number a block.
template <class T>
Drawn draw(const T* row, int64_t size, float scale, double uniform, float* sums) {
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    const auto length = [&](int64_t block) { return size - block * BLOCK < BLOCK ? size - block * BLOCK : BLOCK; };
    Floats tops = all(NOTHING);
    each(row, size, scale, [&](int64_t, Floats x) { tops = larger(tops, x); });
    const float top = largest(tops);
    if (!(top > NOTHING)) return {0, NAN};  // no token is possible, not even what stands for the lanes beyond the last
    double total = 0;
    for (int64_t block = 0; block < blocks; block++) {
        Floats here = {};
        each(row + block * BLOCK, length(block), scale, [&](int64_t, Floats x) { here += weights(x, top); });
        sums[block] = sum(here);
        total += sums[block];
    }
    const double target = uniform * total;
    double before = 0;
    int64_t found = 0;
    for (int64_t block = 0; block < blocks && before <= target; block++)  // the last of some weight, if rounding leaves none above
        if (sums[block] > 0) found = block, before += sums[block];
    double passed = before - sums[found];
    int64_t token = 0;
    each(row + found * BLOCK, length(found), scale, [&](int64_t from, Floats x) {
        if (passed > target) return;
        alignas(64) float weight[LANES];
        store(weight, weights(x, top));
        for (int64_t i = 0; i < LANES && passed <= target; i++)
            if (weight[i] > 0) token = from + i, passed += weight[i];
    });
    token += found * BLOCK;
    return {token, (float)(one(row + token) * scale - top - std::log(total))};
}

}  // namespace

extern "C" {

// `tokens` and their log-probabilities [rows] under softmax(scale * logits) of `logits` [rows, size], by `uniforms` [rows] in
// [0, 1). `sums` is [rows, size / 256], rounded up.
void covey_draw(const void* logits, const double* uniforms, int64_t* tokens, float* logps, float* sums, int64_t rows, int64_t size,
                double scale, int64_t threads) {
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const Drawn drawn = draw((const NUMBER*)logits + row * size, size, (float)scale, uniforms[row], sums + row * blocks);
        tokens[row] = drawn.token, logps[row] = drawn.logp;
    }
}
}
