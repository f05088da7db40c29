// Log-probability and entropy of a row of logits, and the gradient of both in place of the logits, on a CPU: one pass over
// memory each. Numbers are float32 or bfloat16, sums are in float32.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

namespace {

template <class T>
void score(const T* logits, const int64_t* targets, float* logp, float* normalizer, float* entropy, int64_t rows, int64_t size,
           double scale, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const T* mine = logits + row * size;
        Floats tops = all(NOTHING);
        each(mine, size, scale, [&](int64_t, Floats x) { tops = larger(tops, x); });
        const float top = largest(tops);
        Floats totals = {}, falls = {};
        each(mine, size, scale, [&](int64_t, Floats x) {
            Floats fall = x - top;
            fall = fall < all(-87.0f) ? all(-87.0f) : fall;  // a token that cannot happen counts as nothing, not as 0 * -inf
            const Floats weight = exponential(fall);
            totals += weight;
            falls += weight * fall;
        });
        const float total = sum(totals), log_total = std::log(total);
        normalizer[row] = top + log_total;
        logp[row] = one(mine + targets[row]) * (float)scale - normalizer[row];
        entropy[row] = log_total - sum(falls) / total;
    }
}

template <class T>
void score_backward(T* logits, const int64_t* targets, const float* normalizer, const float* entropy, const float* of_logp,
                    const float* of_entropy, int64_t rows, int64_t size, double scale, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        T* mine = logits + row * size;
        const float log_total = normalizer[row], open = entropy[row];
        const float one_slope = of_logp ? of_logp[row] * (float)scale : 0.0f;
        const float other_slope = of_entropy ? of_entropy[row] * (float)scale : 0.0f;
        const float wanted = one(mine + targets[row]) * (float)scale - log_total;
        each(mine, size, scale, [&](int64_t i, Floats x) {
            Floats logs = x - log_total;
            logs = logs < all(-87.0f) ? all(-87.0f) : logs;
            const Floats slope = -exponential(logs) * ((logs + open) * other_slope + one_slope);
            if (i + LANES <= size) store(mine + i, slope);
            else
                for (int64_t j = i; j < size; j++) put(mine + j, slope[j - i]);
        });
        const float chance = std::exp(wanted);
        put(mine + targets[row], one_slope - chance * ((wanted + open) * other_slope + one_slope));
    }
}

}  // namespace

extern "C" {

// Of softmax(scale * logits): log-probability of each target, log of the sum, entropy in nats; each [rows].
void covey_score(const void* logits, const int64_t* targets, float* logp, float* normalizer, float* entropy, int64_t rows, int64_t size,
                 double scale, int64_t threads) {
    score<NUMBER>((const NUMBER*)logits, targets, logp, normalizer, entropy, rows, size, scale, threads);
}

// The gradient of the logits, in their place; those of log-probability and entropy may be null.
void covey_score_backward(void* logits, const int64_t* targets, const float* normalizer, const float* entropy, const float* of_logp,
                          const float* of_entropy, int64_t rows, int64_t size, double scale, int64_t threads) {
    score_backward<NUMBER>((NUMBER*)logits, targets, normalizer, entropy, of_logp, of_entropy, rows, size, scale, threads);
}
}
