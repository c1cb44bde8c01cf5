"""Device helpers that several kernels share: entering and leaving a launch, meeting in one, weight tiles, Philox.

Programmatic dependent launch lets a kernel start before its predecessor has ended. PDL is 0 (not used) or a trigger
mode of tile.py. Before `enter` a program may read constants, cache rows older than the live position and state that
only the graph's last kernel writes; it may store nothing. On every path at least one program waits, so that the end
of a kernel implies the end of all before it.
"""

from __future__ import annotations

from monograph.kernels.triton_import import tl, triton


@triton.jit
def enter(PDL: tl.constexpr):
    """Waits until everything launched before has ended, and lets the next kernel start when PDL says so."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def leave(PDL: tl.constexpr):
    """The way out of a launch with nothing to do: one program still waits, the others go at once."""
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if PDL > 0 and first:
        tl.extra.cuda.gdc_wait()


@triton.jit
def opaque(value, ON_DEVICE: tl.constexpr):
    """The value, of which the compiler may assume nothing."""
    if ON_DEVICE:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def arrive(arrivals_ptr):
    """Announces this program, after all that its threads have written; returns how many were there before it.

    Who finds that all others were there sees what they have written, if it reads past the L1 cache (.cg).
    """
    tl.debug_barrier()  # what all threads wrote comes before the arrival that one of them announces
    return tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def meet(arrivals_ptr, arrivals):
    """Waits until that many have arrived, this program among them. All of them have to be resident at once."""
    arrived = arrive(arrivals_ptr) + 1
    while arrived < arrivals:
        arrived = tl.atomic_add(arrivals_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def load_rows(
    weight_ptr,  # D [*, K]
    rows,  # int32 [R]
    live,  # bool [R], read only if MASKED
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Asks for CHUNKS * BLOCK_K columns of some rows: a tuple of tiles [R, BLOCK_K], zero beyond the matrix.

    Weights are read once a step, so they are the first to be evicted from L2 (+1 to 2 % of a step on an H200).
    """
    offs_k = tl.arange(0, BLOCK_K)
    pointers = weight_ptr + rows.to(tl.int64)[:, None] * K + offs_k[None, :]
    tiles = ()
    for i in tl.static_range(CHUNKS):
        if MASKED:
            mask = live[:, None] & (i * BLOCK_K + offs_k < K)[None, :]
            tile = tl.load(pointers + i * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
        elif (i + 1) * BLOCK_K > K:
            mask = (i * BLOCK_K + offs_k < K)[None, :]
            tile = tl.load(pointers + i * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers + i * BLOCK_K, eviction_policy="evict_first")
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_vector(vector_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):
    """A vector in the chunks of `load_rows`: a tuple of [BLOCK_K], zero beyond the vector."""
    offs_k = tl.arange(0, BLOCK_K)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        if (i + 1) * BLOCK_K > K:
            chunk = tl.load(vector_ptr + i * BLOCK_K + offs_k, mask=i * BLOCK_K + offs_k < K, other=0.0)
        else:
            chunk = tl.load(vector_ptr + i * BLOCK_K + offs_k)
        chunks += (chunk,)  # type: ignore[assignment]
    return chunks


@triton.jit
def load_activations(vector_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr):
    """An fp32 vector in the chunks of `load_rows`, spread over threads as the columns of the weights are.

    A thread holds VECTOR columns of 16-bit weights but would be given 4 of fp32: loading two halves of VECTOR columns
    saves an exchange through shared memory after the wait.
    """
    if VECTOR == 4:
        return load_vector(vector_ptr, K, BLOCK_K, CHUNKS)
    HALF: tl.constexpr = VECTOR // 2
    offs_half = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, HALF)[None, :]
    chunks = ()
    for i in tl.static_range(CHUNKS):
        offs_k = i * BLOCK_K + offs_half
        if (i + 1) * BLOCK_K > K:
            low = tl.load(vector_ptr + offs_k, mask=offs_k < K, other=0.0)
            high = tl.load(vector_ptr + offs_k + HALF, mask=offs_k + HALF < K, other=0.0)
        else:
            low = tl.load(vector_ptr + offs_k)
            high = tl.load(vector_ptr + offs_k + HALF)
        chunk = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BLOCK_K])
        chunks += (chunk,)  # type: ignore[assignment]
    return chunks


@triton.jit
def normalise(x, norm_weight, eps, K: tl.constexpr, CHUNKS: tl.constexpr):
    """RMSNorm without its division: the chunks of x * norm_weight, and 1 / rms(x) to multiply products with."""
    squares = x[0] * x[0]
    scaled = (x[0] * norm_weight[0].to(tl.float32),)
    for i in tl.static_range(1, CHUNKS):
        squares += x[i] * x[i]
        scaled += (x[i] * norm_weight[i].to(tl.float32),)  # type: ignore[assignment]
    return scaled, tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def dot_rows(
    tiles,  # CHUNKS times D [R, BLOCK_K]
    vector,  # CHUNKS times fp32 [BLOCK_K]
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """fp32 [R]: each row times the vector. The columns of one load add up within a thread, then over threads."""
    partial = tl.zeros([R, BLOCK_K // VECTOR], dtype=tl.float32)
    for i in tl.static_range(CHUNKS):
        products = tiles[i].to(tl.float32) * vector[i][None, :]
        partial += tl.sum(tl.reshape(products, [R, BLOCK_K // VECTOR, VECTOR]), axis=2)
    return tl.sum(partial, axis=1)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al. 2011): four random words for a 128-bit counter under a 64-bit key, all uint32."""
    multiplier0 = tl.full([], 0xD2511F53, tl.uint32)
    multiplier1 = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(multiplier0, c0)
        high1 = tl.umulhi(multiplier1, c2)
        low0 = multiplier0 * c0
        low1 = multiplier1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3
