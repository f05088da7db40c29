// Operations between the matmuls of a decoder layer, forward and backward on a CPU: RMSNorm and gated SiLU. Each is
// one pass over memory; sums are in float32 in every precision. Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

extern "C" {
int omp_get_thread_num(void);
}

namespace {

constexpr int64_t FEW = 16384;  // elements below which one thread is enough

// RMSNorm of each row: out = x * scale * weight with scale = (mean of x^2 + epsilon)^-1/2.
template <class X, class Y>
void norm(const X* x, const float* weight, Y* out, float* scales, int64_t rows, int64_t size, double epsilon, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const X* mine = x + row * size;
        Floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats value = load(mine + i);
            squares += value * value;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + (float)epsilon);
        scales[row] = scale;
        for (int64_t i = 0; i < size; i += LANES) store(out + row * size + i, load(mine + i) * scale * load(weight + i));
    }
}

// Gradient of x, and in `sums` [threads, size] each thread's share of the weight's gradient.
template <class X, class Y>
void norm_backward(const Y* gradient, const X* x, const float* weight, const float* scales, X* out, float* sums, int64_t rows,
                   int64_t size, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * size > FEW)
    {
        float* own = sums + omp_get_thread_num() * size;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const X* mine = x + row * size;
            const Y* slope = gradient + row * size;
            const float scale = scales[row];
            Floats along = {};
            for (int64_t i = 0; i < size; i += LANES) {
                const Floats normed = load(mine + i) * scale, given = load(slope + i);
                store(own + i, load(own + i) + given * normed);
                along += given * load(weight + i) * normed;
            }
            const float mean = sum(along) / (float)size;
            for (int64_t i = 0; i < size; i += LANES) {
                const Floats normed = load(mine + i) * scale;
                store(out + row * size + i, (load(slope + i) * load(weight + i) - normed * mean) * scale);
            }
        }
    }
}

inline Floats sigmoid(Floats x) {
#ifdef WIDE  // `exponential` accepts positive arguments
    const Floats e = exponential((Floats)_mm512_min_ps(_mm512_set1_ps(87.0f), (__m512)-x));
    return all(1.0f) / (e + 1.0f);
#else
    const Floats e = exponential(x < all(0.0f) ? x : -x), over = all(1.0f) / (e + 1.0f);
    return x < all(0.0f) ? e * over : over;
#endif
}

// out = SiLU(gate) * up
template <class T>
void gate(const T* gates, const T* ups, T* out, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && count > FEW)
    for (int64_t i = 0; i < count; i += LANES) store(out + i, silu(load(gates + i)) * load(ups + i));  // bitwise equal to decode.cpp
}

// Gradients of gate and up from that of `SiLU(gate) * up`, which is overwritten by the product itself if `repeats`.
template <class T>
void gate_backward(T* gradient, const T* gates, const T* ups, T* gate_gradient, T* up_gradient, int64_t count, int64_t repeats,
                   int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && count > FEW)
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load(gates + i), up = load(ups + i), given = load(gradient + i);
        const Floats open = sigmoid(x), silu = x * open;
        store(up_gradient + i, given * silu);
        store(gate_gradient + i, given * up * open * (x * (1.0f - open) + 1.0f));
        if (repeats) store(gradient + i, silu * up);
    }
}

}  // namespace

// STREAM: dtype of the residual stream; NUMBER: dtype of matmuls. fused_ops.py defines both.
extern "C" {

void covey_norm(const void* x, const float* weight, void* out, float* scales, int64_t rows, int64_t size, double epsilon,
                int64_t threads) {
    norm<STREAM, NUMBER>((const STREAM*)x, weight, (NUMBER*)out, scales, rows, size, epsilon, threads);
}

void covey_norm_backward(const void* gradient, const void* x, const float* weight, const float* scales, void* out, float* sums,
                         int64_t rows, int64_t size, int64_t threads) {
    norm_backward<STREAM, NUMBER>((const NUMBER*)gradient, (const STREAM*)x, weight, scales, (STREAM*)out, sums, rows, size, threads);
}

void covey_gate(const void* gates, const void* ups, void* out, int64_t count, int64_t threads) {
    gate<NUMBER>((const NUMBER*)gates, (const NUMBER*)ups, (NUMBER*)out, count, threads);
}

void covey_gate_backward(void* gradient, const void* gates, const void* ups, void* gate_gradient, void* up_gradient, int64_t count,
                         int64_t repeats, int64_t threads) {
    gate_backward<NUMBER>((NUMBER*)gradient, (const NUMBER*)gates, (const NUMBER*)ups, (NUMBER*)gate_gradient, (NUMBER*)up_gradient, count, repeats, threads);
}
}
