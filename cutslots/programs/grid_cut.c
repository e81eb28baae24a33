/* The linear maps of GridCut for small images: all of a cut in one call. See grid_cut.py.

   Compiled once for float and once for double (-DREAL=...). Arrays are contiguous. `x` (modes, W) and `y` (modes, H) are
   the cosine transforms, `spectrum` (H, W) the factor of each mode. `scratch` has 2 H W + H H + W W numbers. */

#include <stdint.h>
#include <string.h>

typedef REAL real;

/* out (m, n) = a (m, k) b (k, n) */
static void multiply(int64_t m, int64_t k, int64_t n, const real *restrict a, const real *restrict b,
                     real *restrict out) {
    for (int64_t i = 0; i < m; i++) {
        real *restrict row = out + i * n;
        for (int64_t x = 0; x < n; x++) row[x] = a[i * k] * b[x];
        for (int64_t j = 1; j < k; j++) {
            real factor = a[i * k + j];
            const real *restrict other = b + j * n;
            for (int64_t x = 0; x < n; x++) row[x] += factor * other[x];
        }
    }
}

static void transpose(int64_t n, const real *restrict a, real *restrict out) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) out[j * n + i] = a[i * n + j];
}

typedef struct {
    int64_t H, W;
    const real *x, *y, *spectrum;
    real *scratch, *x_back, *y_back; /* the last two: transposes of x and y */
} transform;

static transform prepare(int64_t H, int64_t W, const real *x, const real *y, const real *spectrum, real *scratch) {
    transform t = {H, W, x, y, spectrum, scratch, scratch + 2 * H * W, scratch + 2 * H * W + W * W};
    transpose(W, x, t.x_back), transpose(H, y, t.y_back);
    return t;
}

/* q (H, W) = IDCT(spectrum * DCT(q)) */
static void filter(const transform *t, real *restrict q) {
    int64_t H = t->H, W = t->W;
    multiply(H, W, W, q, t->x_back, t->scratch);
    multiply(H, H, W, t->y, t->scratch, q);
    for (int64_t i = 0; i < H * W; i++) q[i] *= t->spectrum[i];
    multiply(H, H, W, t->y_back, q, t->scratch);
    multiply(H, W, W, t->scratch, t->x, q);
}

/* p (batch, H, W) of w (batch, 6, H, W) */
void vertices(const real *restrict w, real *restrict p, int64_t batch, int64_t H, int64_t W, const real *x,
              const real *y, const real *spectrum, real *scratch) {
    transform t = prepare(H, W, x, y, spectrum, scratch);
    int64_t N = H * W;
    for (int64_t b = 0; b < batch; b++, w += 6 * N, p += N) {
        const real *restrict right = w, *restrict left = w + N, *restrict down = w + 2 * N, *restrict up = w + 3 * N;
        for (int64_t i = 0; i < N; i++) p[i] = w[5 * N + i] - w[4 * N + i];
        for (int64_t row = 0; row < N; row += W)
            for (int64_t i = row; i < row + W - 1; i++) {
                real flow = right[i] - left[i + 1];
                p[i] += flow, p[i + 1] -= flow;
            }
        for (int64_t i = 0; i < N - W; i++) {
            real flow = down[i] - up[i + W];
            p[i] += flow, p[i + W] -= flow;
        }
        filter(&t, p);
    }
}

/* w (batch, 6, H, W), the adjoint of `vertices`, of p (batch, H, W) */
void vertices_adjoint(const real *restrict p, real *restrict w, int64_t batch, int64_t H, int64_t W, const real *x,
                      const real *y, const real *spectrum, real *scratch) {
    transform t = prepare(H, W, x, y, spectrum, scratch);
    int64_t N = H * W;
    real *restrict q = scratch + N;
    for (int64_t b = 0; b < batch; b++, w += 6 * N, p += N) {
        real *restrict right = w, *restrict left = w + N, *restrict down = w + 2 * N, *restrict up = w + 3 * N;
        memcpy(q, p, N * sizeof(real));
        filter(&t, q);
        for (int64_t first = 0; first < N; first += W) {
            int64_t last = first + W - 1;
            for (int64_t i = first; i < last; i++) right[i] = q[i] - q[i + 1], left[i + 1] = q[i + 1] - q[i];
            right[last] = left[first] = 0;
        }
        for (int64_t i = 0; i < N - W; i++) down[i] = q[i] - q[i + W], up[i + W] = q[i + W] - q[i];
        for (int64_t i = 0; i < W; i++) down[N - W + i] = up[i] = 0;
        for (int64_t i = 0; i < N; i++) w[4 * N + i] = -q[i], w[5 * N + i] = q[i];
    }
}
