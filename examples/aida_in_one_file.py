"""Aida in one file: Algorithm 1 of the paper as a torch optimizer. Copy it into your project.

Needs torch alone. One tensor at a time, plain tensor operations, decoupled weight decay as in AdamW. The package has
the same update ten times as fast, with mixed precision, clipping, checkpoints and checks.
"""

import torch


class Aida(torch.optim.Optimizer):
    """AdaBelief whose second moment is fed by the gradient and its running mean after mutual projections per layer.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the stored second moment at every step, so that no stepsize exceeds sqrt((1 - beta2) / eps).
        weight_decay: decoupled weight decay, as in AdamW.
        projections: how many mutual projections, the paper's K.
        xi: keeps a projection onto a zero vector defined.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, projections=2, xi=1e-20):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "projections": projections,
                "xi": xi,
            },
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                    state["exp_avg_var"] = torch.zeros_like(state["exp_avg"])
                m, v = state["exp_avg"], state["exp_avg_var"]
                g = p.grad.to(m.dtype)
                state["step"] += 1
                t = state["step"]

                # first moment
                m.mul_(beta1).add_(g, alpha=1 - beta1)

                # mutual projections of the layer's m and g: both new vectors come from the old pair
                m_k, g_k = m.double(), g.double()
                for _ in range(group["projections"]):
                    inner = torch.sum(m_k * g_k)
                    m_k, g_k = (
                        inner / (torch.sum(g_k * g_k) + group["xi"]) * g_k,
                        inner / (torch.sum(m_k * m_k) + group["xi"]) * m_k,
                    )

                # second moment; eps is stored with it
                v.mul_(beta2).add_((m_k - g_k).to(v.dtype).square(), alpha=1 - beta2).add_(group["eps"])

                # parameters
                m_hat = m / (1 - beta1**t)
                v_hat = v / (1 - beta2**t)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((group["lr"] * m_hat / v_hat.sqrt()).to(p.dtype))
        return loss
