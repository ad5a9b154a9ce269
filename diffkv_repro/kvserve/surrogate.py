"""Gaussian processes on relative quality: BoTorch's in float64, scikit-learn's as the second arm (KVServe, section 5).

Both have a Matern kernel of smoothness 1.5 and a noise that is learnt, as the released code has.
"""

import warnings
from typing import Protocol

import numpy as np
import torch

_STEPS = 50  # of L-BFGS; a fit begins from the last one's result
_LEAST_DEVIATION = 1e-9


class Surrogate(Protocol):
    """Predicts quality [n] and its standard deviation at points [n, columns]."""

    def fit(self, points: np.ndarray, values: np.ndarray) -> None:
        """Learn from measured ``values``. Raises what its library raises on numeric failure."""

    def imagine(self, points: np.ndarray, values: np.ndarray) -> None:
        """Take ``values`` as if they were measured, hyperparameters as they are, until the next :meth:`fit`."""

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the quality itself, without the noise of measuring it."""


class BotorchGP:
    """BoTorch's ``SingleTaskGP`` with one length scale a column; deterministic, whatever threads do elsewhere."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._state: dict | None = None

    def fit(self, points: np.ndarray, values: np.ndarray) -> None:
        """As :meth:`Surrogate.fit`, from the hyperparameters of the last fit."""
        from botorch.optim.fit import fit_gpytorch_mll_scipy
        from gpytorch.mlls import ExactMarginalLogLikelihood

        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        self._points, self._values = points, values
        model = self._model(points, values)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(self._seed)
            warnings.simplefilter("ignore")  # that it stopped at the last step, with what is good enough
            likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
            found = fit_gpytorch_mll_scipy(likelihood, options={"maxiter": _STEPS})
        if not np.isfinite(float(found.fval)):
            raise ArithmeticError(f"the likelihood of the Gaussian process is {found.fval}")
        self._state = model.state_dict()
        self.model = model.eval()
        self._condition()

    def imagine(self, points: np.ndarray, values: np.ndarray) -> None:
        """As :meth:`Surrogate.imagine`."""
        self._points, self._values = np.vstack([self._points, points]), np.concatenate([self._values, values])
        self._condition()

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`Surrogate.predict`.

        What the model's ``posterior`` gives for each point alone, without the covariances between thousands of points
        that it would work out.
        """
        with torch.no_grad():
            across = self.model.covar_module(torch.as_tensor(points, dtype=torch.float64), self._inputs).to_dense()
            solved = torch.linalg.solve_triangular(self._factor, across.T, upper=False)
            variance = self.model.covar_module.outputscale - solved.square().sum(dim=0)
            mean = self.model.mean_module.constant + across @ self._weights[:, 0]
        return _finite(self._mean + self._scale * mean.numpy(), self._scale * variance.clamp(min=0).sqrt().numpy())

    def _condition(self) -> None:
        """Cholesky factor of the covariance of what is known, and the weights of its deviations from the mean."""
        self._inputs = torch.as_tensor(self._points, dtype=torch.float64)
        with torch.no_grad():
            covariance = self.model.covar_module(self._inputs).to_dense()
            covariance.diagonal().add_(self.model.likelihood.noise)
            self._factor = torch.linalg.cholesky(covariance)
            scaled = torch.as_tensor((self._values - self._mean) / self._scale, dtype=torch.float64)
            deviation = (scaled - self.model.mean_module.constant)[:, None]
            self._weights = torch.cholesky_solve(deviation, self._factor)

    def _model(self, points: np.ndarray, values: np.ndarray):
        from botorch.models import SingleTaskGP
        from gpytorch.constraints import GreaterThan
        from gpytorch.kernels import MaternKernel, ScaleKernel
        from gpytorch.likelihoods import GaussianLikelihood
        from gpytorch.priors import GammaPrior, LogNormalPrior

        columns = points.shape[1]
        kernel = ScaleKernel(
            MaternKernel(nu=1.5, ard_num_dims=columns, lengthscale_prior=LogNormalPrior(0.5, 1.0)),
            outputscale_prior=GammaPrior(2.0, 0.5),
        )
        noise = GaussianLikelihood(noise_prior=LogNormalPrior(-5.0, 1.5), noise_constraint=GreaterThan(1e-5))
        noise.noise = 1e-2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that points are not in the unit cube: without encoding they are not
            model = SingleTaskGP(
                torch.as_tensor(points, dtype=torch.float64),
                torch.as_tensor((values - self._mean) / self._scale, dtype=torch.float64)[:, None],
                likelihood=noise, covar_module=kernel, outcome_transform=None, input_transform=None,
            ).double()  # fmt: skip
        if self._state is not None:
            model.load_state_dict(self._state)
        return model


class SklearnGP:
    """scikit-learn's regressor, what the released code uses: one length scale, white noise, five restarts."""

    def __init__(self, seed: int = 0, restarts: int = 5) -> None:
        self._seed, self._restarts = seed, restarts

    def fit(self, points: np.ndarray, values: np.ndarray) -> None:
        """As :meth:`Surrogate.fit`."""
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        self._points, self._values = points, values
        kernel = Matern(length_scale=1.0, nu=1.5) + WhiteKernel(1e-4, noise_level_bounds=(1e-8, 1e1))
        self._model = self._regressor(kernel, restarts=self._restarts)
        self._kernel = self._model.kernel_

    def imagine(self, points: np.ndarray, values: np.ndarray) -> None:
        """As :meth:`Surrogate.imagine`."""
        self._points, self._values = np.vstack([self._points, points]), np.concatenate([self._values, values])
        self._model = self._regressor(self._kernel, restarts=None)

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`Surrogate.predict`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _finite(*self._model.predict(points, return_std=True))

    def _regressor(self, kernel, restarts: int | None):
        from sklearn.gaussian_process import GaussianProcessRegressor

        options = {"optimizer": None} if restarts is None else {"n_restarts_optimizer": restarts}
        model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=self._seed, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.fit(self._points, self._values)


def _finite(mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not (np.isfinite(mean).all() and np.isfinite(deviation).all()):
        raise ArithmeticError("the Gaussian process predicts what is not finite")
    return mean, np.maximum(deviation, _LEAST_DEVIATION)


SURROGATES = {"botorch": BotorchGP, "sklearn": SklearnGP}
